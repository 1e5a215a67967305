"""First uses while GPUs wait: what a call needs was loaded before, so no rank waits for ever."""

import json
import subprocess
import sys

import pytest
from gpu_vendor import BACKEND
from ranks import LAUNCHER, environment
from source_tree import ROOT

PROGRAM = [sys.executable, str(ROOT / "tests/support/first_uses.py"), BACKEND]


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_first_uses_while_gpus_wait(world_size, ranks, loading):
    """In processes of their own, which have loaded nothing. AMD reads no variable of CUDA."""
    launcher = [*LAUNCHER, "-n", str(world_size), "--"] if ranks == "processes" else []
    arguments = [str(world_size)] if ranks == "threads" else []
    done = subprocess.run(
        [*launcher, *PROGRAM, *arguments],
        env=environment(CUDA_MODULE_LOADING=loading),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["wrong"] == [[]] * world_size
