"""The struct that a user's kernel takes to make calls."""

from dataclasses import dataclass, field

from ..base.copying import not_copied


@dataclass(frozen=True)
class DeviceComm:
    """A `kccl::DeviceComm` for kernels' arguments, from `comm.device_comm()`.

    Attributes:
        rank, world_size: The communicator's.
        channels: How many coops may make calls at the same time.
        max_bytes: The most bytes of one coop's call.
        data: The struct's bytes.
    """

    rank: int
    world_size: int
    channels: int
    max_bytes: int
    data: bytes = field(repr=False)

    __reduce_ex__ = not_copied(
        "a DeviceComm has addresses of its process and belongs to its communicator",
        "call comm.device_comm() on every rank, and pass the DeviceComm to kernels as it is",
    )
