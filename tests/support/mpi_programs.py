"""Runs programs that use kccl.interop.mpi, with a library of MPI."""

import subprocess
import sys

import ranks
from mpi_nodes import launcher
from ranks import environment, facts

PRELUDE = (
    ranks.PRELUDE
    + "import numpy as np\n"
    + """
from kccl.interop import mpi as MPI
world = MPI.COMM_WORLD
rank = world.rank

def warm(comm):
    "A communicator begins with some calls by MPI."
    for _ in range(20):
        comm.Barrier()
    return comm
"""
)


def run_words(library, world_size, *words, timeout=100, **variables):
    start, needed = launcher(library, world_size)
    return subprocess.run(
        [*map(str, start), *map(str, words)],
        env=environment(**needed) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run(library, world_size, program, **variables):
    """What the ranks of a program said, and its standard error. It must succeed."""
    done = run_words(library, world_size, sys.executable, "-c", PRELUDE + program, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return facts(done.stdout), done.stderr
