"""KCCL for users of PyTorch and mpi4py. Only this package's modules import those libraries."""

from importlib import import_module
from types import ModuleType

__all__ = ["mpi", "torch"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
