"""First uses while GPUs wait: what a call needs was loaded before, so no rank waits for ever."""

import json
import subprocess
import sys

import hip_runtime
import pytest
import ranks
from long import long_after
from source_tree import ROOT

PROGRAM = ROOT / "tests/support/first_uses.py"


@pytest.mark.parametrize("what", long_after(1, ["device", "all"]))
def test_first_uses_while_gpus_wait(what):
    """In a process of its own, which has loaded nothing."""
    pytest.importorskip("hip", reason="hip-python is not installed")
    # To the simulator each stream is a GPU, so a field of a communicator has too narrow a scope
    # where calls of two streams use it.
    variables = {"HIP_RUNTIME_UNCHECKED": "1", "HIP_RUNTIME_LOADS_WAIT": what}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "hip", "2"],
        env=ranks.environment(**variables, **hip_runtime.environment()),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wrong"] == [[]] * 2
