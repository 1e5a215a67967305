"""What the tests share: an environment of their own, and ranks that are processes."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "workers"


_cache = ""


def pytest_configure():
    """Kernels that a session compiles are its own, and one test's serve the next."""
    global _cache
    _cache = tempfile.mkdtemp(prefix="kccl-tests-")
    os.environ["KCCL_CACHE"] = _cache


def pytest_unconfigure():
    shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An installed package, a clean environment, and waits that end before pytest's time-out.

    In the checkout's root `python -m` and `-c` would import the source tree, not the package.
    """
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("KCCL_") and name != "KCCL_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("KCCL_TIMEOUT", "20")
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "40")


@pytest.fixture
def mpirun():
    """mpirun(world_size, worker, *args): runs tests/workers/<worker>.py; returns its output."""

    def run(world_size, worker, *args):
        command = [
            Path(sys.executable).parent / "mpirun",
            *("-n", str(world_size), sys.executable, WORKERS / f"{worker}.py", *args),
        ]
        path = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        done = subprocess.run(
            [str(word) for word in command],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
