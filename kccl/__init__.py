"""KCCL: collectives for messages so small that latency is everything.

    import kccl, numpy as np
    comm = kccl.init()
    x = np.full(4, comm.rank, np.float32)
    comm.all_reduce(x)

Start several ranks with `mpirun -n 4 python program.py` or `kccl run -n 4 -- python program.py`.
"""

from importlib import import_module
from os import environ
from typing import TYPE_CHECKING, Any

from .base.dtypes import (
    bfloat16,
    bool_,
    complex64,
    complex128,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .base.errors import (
    BackendError,
    CompileError,
    Error,
    InvalidArgument,
    PeerLost,
    ProtocolError,
    Timeout,
    WaitFailed,
)

if TYPE_CHECKING:
    from . import gpu, topology
    from .base import dtypes
    from .base.memory import memory_room
    from .collectives.rms_norm import rms_norm
    from .comm import Communicator
    from .module import Kernel, Module, compile
    from .plan.choice import Plan
    from .plan.ops import premul_sum
    from .ranks.windows import Window
    from .start import init, run_threads
    from .tools import probe, screen

__all__ = [
    "BackendError",
    "Communicator",
    "CompileError",
    "Error",
    "InvalidArgument",
    "Kernel",
    "Module",
    "PeerLost",
    "Plan",
    "ProtocolError",
    "Timeout",
    "WaitFailed",
    "Window",
    "__version__",
    "bfloat16",
    "bool_",
    "cache_dir",
    "cmake_dir",
    "compile",
    "complex64",
    "complex128",
    "dtypes",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "gpu",
    "include_dir",
    "init",
    "install_command",
    "int8",
    "int16",
    "int32",
    "int64",
    "launched_rank",
    "memory_room",
    "premul_sum",
    "probe",
    "rms_norm",
    "run_threads",
    "screen",
    "topology",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

# Public name -> the module that has it, or that it is. They are imported when the name is first
# used, so that `import kccl` is fast.
_LAZY = {
    "Communicator": "comm",
    "Kernel": "module",
    "Module": "module",
    "Plan": "plan.choice",
    "Window": "ranks.windows",
    "compile": "module",
    "init": "start",
    "memory_room": "base.memory",
    "premul_sum": "plan.ops",
    "rms_norm": "collectives.rms_norm",
    "run_threads": "start",
}
_LAZY_MODULES = {
    "dtypes": "base.dtypes",
    "gpu": "gpu",
    "probe": "tools.probe",
    "screen": "tools.screen",
    "topology": "topology",
}


# Under an MPI launcher, a rank that ends tells the others, so that none waits for it in init().
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
if not environ.keys().isdisjoint(_MPI_RANKS):
    import_module(".ranks.last_word", __name__).prepare()
# Under any launcher, claims the rank for this process: processes that it starts are no ranks.
if not environ.keys().isdisjoint((*_MPI_RANKS, "KCCL_RENDEZVOUS", "RANK", "SLURM_PROCID")):
    import_module(".ranks.job", __name__).claim_at_import()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    if name in _LAZY_MODULES:
        return import_module(f".{_LAZY_MODULES[name]}", __name__)
    if name == "__version__":
        from importlib.metadata import version

        return version("kccl")
    raise AttributeError(f"module 'kccl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def launched_rank() -> int | None:
    """Returns this process's rank by its launcher's variables; None if no launcher started it."""
    import os

    from .ranks import launchers

    is_launched = launchers.without_launcher(os.environ) != os.environ
    return launchers.rank_of(os.environ) if is_launched else None


def include_dir() -> str:
    """Returns the folder of the headers, for a compiler's -I and `#include <kccl/kccl.cuh>`."""
    from pathlib import Path

    return str(Path(__file__).parent / "csrc" / "include")


def cache_dir() -> str:
    """Returns the folder that keeps compiled kernels and models between runs. It may be deleted."""
    from .jit.cache import cache_folder

    return str(cache_folder())


def install_command(extra: str) -> str:
    """Returns the command that installs what an extra of KCCL needs, for this Python interpreter.

    Args:
        extra: "mpi", "cuda", "amd", "torch", "engine" or "bench".

    Raises:
        ValueError: There is no such extra.
    """
    from .base import extras

    return extras.install(extra)


def cmake_dir() -> str:
    """Returns the folder of the CMake package, to pass as kccl_DIR for `find_package(kccl)`."""
    from pathlib import Path

    return str(Path(__file__).parent / "csrc" / "cmake")
