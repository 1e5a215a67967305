"""Symmetric windows: what all have in common, and those in host memory."""

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ..base import abi, memory
from ..base.copying import not_copied
from ..base.errors import BackendError, InvalidArgument
from ..base.mapping import map_shared
from .mesh import Mesh


def layout(
    world_size: int,
    num_channels: int,
    packet_bytes: int,
    staging_bytes: int,
    exchange_bytes: int,
) -> dict[str, int]:
    """The fields of KcclLayout, computed by csrc/include/kccl/device_comm.h.

    Args:
        world_size: Number of ranks.
        num_channels: Number of scratch channels: channels for calls, times blocks of each.
        packet_bytes: Payload bytes of one ll16 or sentinel slot.
        staging_bytes: Bytes of one staging slot.
        exchange_bytes: Bytes of all slices of one GridExchange.

    Raises:
        InvalidArgument: A size is not a multiple of its unit, or is too large.
    """
    regions = abi.ffi.new("KcclLayout *")
    fields = {
        "num_channels": num_channels,
        "blocks_per_channel": 1,
        "packet_bytes": packet_bytes,
        "staging_bytes": staging_bytes,
        "exchange_bytes": exchange_bytes,
    }
    sizes = abi.ffi.new("KcclSizes *", fields)
    if abi.lib.kccl_host_layout(regions, world_size, sizes, mmap.PAGESIZE) != 0:
        raise InvalidArgument(
            f"packet_bytes is {packet_bytes}, staging_bytes {staging_bytes} and exchange_bytes "
            f"{exchange_bytes}, must be multiples of {abi.PACKET_UNIT}, {abi.LINE_BYTES} and "
            f"{abi.LINE_BYTES}, and staging_bytes between {abi.LEAST_STAGING_BYTES} "
            f"and 2^31"
        )
    return {name: getattr(regions, name) for name, _ in abi.ffi.typeof("KcclLayout").fields}


class Window(ABC):
    """Memory of the same size on every rank, mapped by all of them.

    Attributes:
        nbytes: Size of each rank's part in bytes.
        mesh: The ranks that share the window.
        addresses: Addresses in this process of all ranks' parts, in rank order.
        local: This rank's part, as a writable buffer; None in GPU memory.
    """

    __reduce_ex__ = not_copied(
        "a window is memory that the ranks' processes have mapped",
        "call comm.window() on every rank, or copy its contents: bytes(window.local) on the host",
    )

    def __init__(self, mesh: Mesh, nbytes: int, addresses: Sequence[int], local: Any) -> None:
        self.nbytes = nbytes
        self.mesh = mesh
        self.addresses = tuple(addresses)
        self.local = local

    @abstractmethod
    def clear(self) -> None:
        """Writes zeros over this rank's part."""


def agree_on_size(mesh: Mesh, nbytes: int, what: str, timeout: float) -> None:
    """Checks the size of a window before it is made. Collective.

    Args:
        mesh: The ranks that share the window.
        nbytes: Size of each rank's part in bytes.
        what: What the ranks are doing, for error messages.
        timeout: Seconds to wait for the other ranks.

    Raises:
        InvalidArgument: The size is not positive, or differs between ranks.
        Timeout, PeerLost: A rank did not come, or went.
    """
    sizes = [text.decode() for text in mesh.allgather(str(nbytes).encode(), what, timeout)]
    for peer, size in enumerate(sizes):
        if size != str(nbytes):
            raise InvalidArgument(
                f"nbytes is {nbytes} on rank {mesh.rank} and {size} on rank {peer}, must be "
                "the same on all ranks"
            )
    if not isinstance(nbytes, int) or not 0 < nbytes < 2**63:
        raise InvalidArgument(f"nbytes is {nbytes!r}, must be an integer of 1 to 2**63 - 1")


class HostWindow(Window):
    """A window in host memory."""

    def __init__(self, mesh: Mesh, maps: Sequence[Any]) -> None:
        """`maps` are all ranks' parts, in rank order."""
        # The buffers keep the mappings alive. So arrays in a window stay valid after close().
        self._buffers = [abi.ffi.from_buffer(each, require_writable=True) for each in maps]
        addresses = [int(abi.ffi.cast("uintptr_t", each)) for each in self._buffers]
        local = maps[mesh.rank]
        super().__init__(mesh, len(local), addresses, local)

    def clear(self) -> None:
        """See Window."""
        abi.ffi.memmove(self.local, b"\0" * self.nbytes, self.nbytes)


def host_window(mesh: Mesh, nbytes: int, what: str, timeout: float) -> HostWindow:
    """Makes a window of memfd segments. Collective; see agree_on_size().

    A segment lives as long as a process maps it or holds its descriptor. So a job that is killed
    leaves nothing behind.

    Raises:
        BackendError: The operating system refused the memory, or there is too little.
    """
    with mesh.together(what, timeout), ExitStack() as descriptors:
        agree_on_size(mesh, nbytes, what, timeout)
        memory.check_room(nbytes, mesh.world_size)
        fd = os.memfd_create("kccl", os.MFD_CLOEXEC)
        descriptors.callback(os.close, fd)
        _resize(fd, nbytes)
        fds = mesh.exchange_fds(fd, what, timeout)
        for each in fds.values():
            descriptors.callback(os.close, each)
        fds[mesh.rank] = fd
        return HostWindow(mesh, [map_shared(fds[rank], nbytes) for rank in sorted(fds)])


def _resize(fd: int, nbytes: int) -> None:
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise BackendError(
            f"a file of {nbytes} bytes is refused: {error}; `ulimit -f` limits windows too"
        ) from error
