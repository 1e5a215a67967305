"""Ranks with GPUs on several nodes, which KCCL_RANKS_PER_NODE makes of one machine."""

import os
import subprocess
import sys

import hip_runtime
import pytest
from mpi_nodes import WORKERS, launcher
from ranks import environment
from source_tree import ROOT


def run(world_size, per_node, *words):
    start, needed = launcher("mpich", world_size)
    variables = {
        **needed,
        **hip_runtime.environment(),
        "KCCL_RANKS_PER_NODE": str(per_node),
        "HIP_RUNTIME_UNCHECKED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")]),
    }
    words = [*start, sys.executable, WORKERS / "gpu_nodes.py", "hip", *words]
    done = subprocess.run(
        [str(word) for word in words],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout.count("right")) == (0, world_size), (
        done.stdout + done.stderr
    )


@pytest.mark.takes(20)
def test_every_collective_in_many_pieces():
    pytest.importorskip("hip", reason="hip-python is not installed")
    run(2, 1, "few")


@pytest.mark.long
@pytest.mark.takes(20)
def test_nodes_of_two_ranks_and_of_one():
    pytest.importorskip("hip", reason="hip-python is not installed")
    run(3, 2, "few")
