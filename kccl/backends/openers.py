"""Finds a backend by its name. Only the host's is imported before a program asks for another."""

from typing import Literal

from ..base.abi import MAX_WORLD_SIZE
from .base import Opener
from .grouped import OnHost

# "auto" means "host". "sim" is for threads only, because a simulation has all ranks in one process.
ON_GPUS = ("cuda", "hip")
OF_PROCESSES = ("auto", "host", *ON_GPUS)
OF_THREADS = (*OF_PROCESSES, "sim")


def opener(backend: str, way: Literal["of_process", "of_thread", "number"], number: int) -> Opener:
    """Returns the Opener of a backend.

    Args:
        backend: A name in OF_THREADS.
        way: The method of OnDevice that finds a rank's GPU.
        number: The argument of this method: a local rank, the rank of a thread, or a GPU's number.
    """
    if backend in ON_GPUS:
        from ..gpu import driver
        from .on_device import OnDevice

        driver.choose(driver.VENDORS[backend])
        on_device: Opener = getattr(OnDevice, way)(number)
        return on_device
    if backend == "sim":
        from .sim import SimBackend

        return SimBackend
    return OnHost()


def most_ranks(backend: str) -> int:
    """Returns the most ranks of a communicator of the backend of this name."""
    return MAX_WORLD_SIZE if backend in (*ON_GPUS, "sim") else OnHost.most_ranks
