"""Chooses the vendor whose GPUs this process drives, and asks the vendor's table."""

from contextlib import suppress
from functools import cache

from ..base.errors import BackendError
from .cuda import CUDA
from .hip import HIP
from .table import Table

VENDORS: dict[str, Table] = {vendor.backend: vendor for vendor in (CUDA, HIP)}
"""The tables by the names of their backends."""

_chosen: Table | None = None


def choose(vendor: Table) -> Table:
    """Lets this process drive GPUs of a vendor; returns its table.

    Raises:
        BackendError: This process drives GPUs of another vendor already.
    """
    global _chosen
    _chosen = _chosen or vendor
    if _chosen is not vendor:
        raise BackendError(
            f"this process drives GPUs of {_chosen.vendor}, so it cannot drive those of "
            f"{vendor.vendor}: one process drives GPUs of one vendor"
        )
    return vendor


def may_choose(vendor: Table) -> bool:
    """Tells whether choose() would succeed: this process drives no GPUs of another vendor."""
    return _chosen in (None, vendor)


def table() -> Table:
    """Returns the table of the vendor that was chosen.

    If none was, this chooses the first one whose driver is here. If there is none, it returns
    NVIDIA's table, whose errors say what is missing.
    """
    if _chosen is not None:
        return _chosen
    vendor = _first_here()
    return CUDA if vendor is None else choose(vendor)


@cache
def _first_here() -> Table | None:
    for vendor in VENDORS.values():
        with suppress(BackendError):
            _ = vendor.binding
            return vendor
    return None


def vendor_of(arch: str) -> Table:
    """Returns the table of the vendor who makes GPUs of an architecture, as in "sm_90a" or
    "gfx942".

    Does not choose the vendor for this process, because compiling needs no GPU.
    """
    return HIP if arch.startswith("gfx") else CUDA


def backend() -> str:
    """Returns the backend of this process's GPUs, "cuda" or "hip"; see table()."""
    return table().backend


def backend_of(arch: str) -> str:
    """Returns the backend of GPUs of an architecture, as in "sm_90a" or "gfx942"."""
    return vendor_of(arch).backend


def driver_version() -> int:
    """Returns the version of the vendor's driver as the driver's number, as 12030 for CUDA 12.3."""
    gpu = table()
    return int(gpu.call(gpu.names.driver_version))


def named(word: str) -> str:
    """Returns the driver's own name of a function, for call(), by a word that all vendors share.

    Args:
        word: A field of kccl.gpu.table.Names, which has the arguments, as in "create_event".
    """
    return str(getattr(table().names, word))
