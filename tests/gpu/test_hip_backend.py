"""Runs tests/hip in a process of its own: its conftest.py says why."""

import subprocess
import sys

import pytest
from source_tree import ROOT

# Their long tests are units of their own: each compiles kernels of several numbers of ranks.
MATRIX = ("test_hip_collectives.py", "test_hip_processes.py")
STARTS = ("test_hip_first_uses.py", "test_hip_nodes.py")
EVERY = tuple(sorted(path.name for path in (ROOT / "tests/hip").glob("test_*.py")))
OTHERS = tuple(name for name in EVERY if name not in MATRIX + STARTS)


@pytest.mark.takes(36)
@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "names"),
    [("not long", EVERY), ("long", MATRIX), ("long", STARTS), ("long", OTHERS)],
    ids=["not long", "matrix", "starts", "others"],
)
def test_the_hip_backend(which, names, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/hip/{name}" for name in names]
    # Those of this test end all.
    command += ["--timeout", "180"]
    command += ["-m", which, *["--complete"][: pytestconfig.option.complete]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    print(done.stdout.splitlines()[-1])
