"""mpi4py's own tests, from its source. `python tests/support/mpi4py_tests.py` fetches them."""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import kccl


def folder():
    """The folder of the tests of the mpi4py that is installed, whether it is there or not."""
    return Path(kccl.cache_dir()) / f"mpi4py-{version('mpi4py')}" / "test"


def fetch():
    """Fetches them, unless they are there."""
    if folder().is_dir():
        return
    into = folder().parents[1]
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as part:
        wanted = f"mpi4py=={version('mpi4py')}"
        # With ":all:" pip would also compile what mpi4py is built with, Cython above all.
        words = ["download", "--no-deps", "--no-binary", "mpi4py", "--dest", part, wanted]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (archive,) = Path(part).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(part, filter="data")
        (Path(part) / folder().parent.name).rename(folder().parent)


if __name__ == "__main__":
    fetch()
