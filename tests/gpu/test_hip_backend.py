"""Runs tests/hip in a process of its own: its conftest.py says why."""

import subprocess
import sys

import pytest
from source_tree import ROOT


@pytest.mark.takes(36)
@pytest.mark.long
@pytest.mark.parametrize("which", ["not long", "long"])
def test_the_hip_backend(which, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hip"]
    # Those of this test end all.
    command += ["--timeout", "180"]
    command += ["-m", which, *["--complete"][: pytestconfig.option.complete]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    print(done.stdout.splitlines()[-1])
