"""Ranks with GPUs on several nodes, which KCCL_RANKS_PER_NODE makes of one machine."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from gpu_vendor import BACKEND
from mpi_nodes import WORKERS
from ranks import environment
from source_tree import ROOT


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("words", [[], ["few"]], ids=["", "many pieces"])
def test_every_collective(world_size, words):
    """Under this machine's mpirun, whatever MPI it is of."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("there is no mpirun with mpi4py on this GPU host")
    variables = {
        "KCCL_RANKS_PER_NODE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Open MPI 4 else looks for ssh, which a container may lack.
        "OMPI_MCA_plm": "isolated",
    }
    command = ["mpirun", "-n", world_size, sys.executable, WORKERS / "gpu_nodes.py", BACKEND]
    done = subprocess.run(
        [str(word) for word in (*command, *words)],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout.count("right")) == (0, world_size), (
        done.stdout + done.stderr
    )
