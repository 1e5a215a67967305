"""mpi4py's own tests, with mpi4py alone and with kccl.interop.mpi in its place."""

import re
import subprocess
import sys

import mpi4py_tests
import pytest
from mpi_nodes import WORKERS, launcher
from ranks import environment

pytestmark = [pytest.mark.long, pytest.mark.takes(36)]

# The calls that KCCL makes are in cco_buf and cco_vec. The others show that the communicators are
# mpi4py's in all else.
FILES = {
    "collectives": r"test_cco_(buf|vec|obj)\.py",
    "point to point": r"test_(p2p_buf|p2p_obj|msgspec)\.py",
    "communicators": r"test_(comm|subclass|attributes|objmodel|pickle|errhandler)\.py",
    # Open MPI's ranks hardly yield their cores, so that more would take a minute.
    "collectives of buffers": r"test_cco_buf\.py",
}


@pytest.fixture(scope="module")
def main():
    """The program that runs the tests."""
    found = mpi4py_tests.folder() / "main.py"
    if not found.exists():
        pytest.skip("mpi4py's tests are not here: tests/support/mpi4py_tests.py fetches them")
    return found


def counts(library, world_size, words):
    """How many tests each rank ran and skipped. All others must have passed."""
    start, needed = launcher(library, world_size)
    done = subprocess.run(
        [*map(str, start), sys.executable, *map(str, words)],
        env=environment(**needed),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    ran = re.findall(r"Ran (\d+) tests", told)
    assert len(ran) == world_size, told
    return ran, sorted(re.findall(r"skipped=(\d+)", told))


@pytest.mark.parametrize(
    ("library", "world_size", "files"),
    [
        *(("mpich", 2, name) for name in ("collectives", "point to point", "communicators")),
        ("openmpi", 2, "collectives of buffers"),
    ],
)
def test_as_many_pass_as_with_mpi4py_alone(main, library, world_size, files):
    # mpi4py's interface for C makes objects of mpi4py's own types.
    words = [main, "--no-builddir", "-q", "-x", "testCAPI", "-i", FILES[files]]
    alone = counts(library, world_size, words)
    assert int(alone[0][0]) > 20
    assert counts(library, world_size, [WORKERS / "mpi4py_on_kccl.py", *words]) == alone
