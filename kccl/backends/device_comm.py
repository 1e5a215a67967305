"""The struct that a user's kernel takes to make calls."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..base.copying import not_copied


@dataclass(frozen=True)
class DeviceComm:
    """A `kccl::DeviceComm` for kernels' arguments, from `comm.device_comm()`.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        channels: How many coops may make calls at the same time.
        max_bytes: The most bytes of one coop's call.
        data: The struct's bytes.
        is_open: Function that tells whether the communicator still has the memory that the struct
            refers to.
    """

    rank: int
    world_size: int
    channels: int
    max_bytes: int
    data: bytes = field(repr=False)
    is_open: Callable[[], bool] = field(repr=False, compare=False)

    __reduce_ex__ = not_copied(
        "a DeviceComm has addresses of its process and belongs to its communicator",
        "call comm.device_comm() on every rank, and pass the DeviceComm to kernels as it is",
    )
