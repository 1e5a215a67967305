"""Symmetric windows: what windows of all backends have in common, and windows in host memory."""

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

from ..base import abi, memory
from ..base.copying import not_copied
from ..base.errors import BackendError, InvalidArgument
from ..base.mapping import map_shared
from ..base.syscalls import allowed
from .team import Connected


def layout(
    world_size: int,
    num_channels: int,
    packet_bytes: int,
    staging_bytes: int,
    exchange_bytes: int,
    message_bytes: int = 0,
) -> dict[str, int]:
    """Returns the fields of KcclLayout, computed by csrc/include/kccl/device_comm.h.

    Args:
        world_size: Number of ranks.
        num_channels: Number of scratch channels: channels for calls, times blocks of each.
        packet_bytes: Payload bytes of one ll16 or sentinel slot.
        staging_bytes: Bytes of one staging slot.
        exchange_bytes: Bytes of all slices of one GridExchange.
        message_bytes: Bytes of the ring of messages from each rank; 0: none.

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
        "message_bytes": message_bytes,
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
        is_closed: close() has freed it.
    """

    __reduce_ex__ = not_copied(
        "a window is memory that the ranks' processes have mapped",
        "call comm.window() on every rank, or copy its contents: bytes(window.local) on the host",
    )

    def __init__(self, mesh: Connected, nbytes: int, addresses: Sequence[int], local: Any) -> None:
        self.nbytes = nbytes
        self.mesh = mesh
        self.is_closed = False
        # Why kernels may no longer use the window; "" while they may.
        self.why_not_in_kernels = ""
        self._addresses = tuple(addresses)
        self._local = local
        # The prepared calls that use this window. free() ends them.
        self._prepared: WeakSet[Endable] = WeakSet()
        self._close: Callable[[Window], None] | None = None
        _by_address[self._addresses[mesh.rank]] = self

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses in this process of all ranks' parts, in rank order."""
        self._check_open()
        return self._addresses

    @property
    def local(self) -> Any:
        """Returns this rank's part as a writable buffer; None in GPU memory."""
        self._check_open()
        return self._local

    def for_kernels(self) -> bytes:
        """Returns the bytes of a KcclWindow, which a kernel takes as `kccl::Window`.

        Raises:
            InvalidArgument: The window is closed, or of a simulation that has ended.
        """
        if self.why_not_in_kernels:
            raise InvalidArgument(
                f"window is one of {self.nbytes} bytes of rank {self.mesh.rank}, "
                f"{self.why_not_in_kernels}"
            )
        fields = {"num_bytes": self.nbytes, "rank": self.mesh.rank, "address": self.addresses}
        window = abi.ffi.new("KcclWindow *", {"world_size": self.mesh.world_size, **fields})
        return bytes(abi.ffi.buffer(window))

    @abstractmethod
    def clear(self) -> None:
        """Writes zeros over this rank's part."""

    # ---- The end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the memory on all ranks. Collective. Idempotent.

        Where arrays still view this rank's part, the part lives until they are gone. On a GPU it
        first waits for all work on the device, also of other libraries. Later uses of the window
        raise InvalidArgument, prepared calls included. A graph that uses it must not be replayed.
        Once the communicator is closed or collected, this gives back what this rank has mapped, and
        is not collective. A window that is not closed lives until nobody refers to it.

        Raises:
            InvalidArgument: The ranks close different windows. None is closed.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died. The window is not
                closed.
        """
        assert self._close is not None, "a scratch ends with its communicator"
        if not self.is_closed:
            self._close(self)

    def closes_by(self, close: "Callable[[Window], None]") -> "Window":
        """Makes close() call `close`. Returns the window."""
        self._close = close
        return self

    def ends(self, call: "Endable") -> None:
        """Makes close() end a prepared call."""
        self._prepared.add(call)

    def free(self) -> None:
        """Ends this rank's use of the window, and its prepared calls.

        The caller has made sure that no kernel of any rank uses the window any more.
        """
        self.is_closed = True
        self._local = None
        for call in list(self._prepared):
            call.end(self._check_open)
        self.drop()

    @abstractmethod
    def drop(self) -> None:
        """Drops this object's references to the memory, which is freed when no array views it."""

    def _check_open(self) -> None:
        if self.is_closed:
            raise InvalidArgument(
                f"window is one of {self.nbytes} bytes that rank {self.mesh.rank} has closed, must "
                "be open: close() has freed it"
            )


class Endable(Protocol):
    """A prepared call that uses a window."""

    def end(self, refuse: Callable[[], None]) -> None:
        """Makes every later run call `refuse`, which raises."""

    def __hash__(self) -> int: ...


# Address of a part in this process -> its window. window_at() looks up arrays of comm.empty() here.
_by_address: "WeakValueDictionary[int, Window]" = WeakValueDictionary()


def window_at(address: int) -> Window | None:
    """Returns the open window in which this rank's part begins at `address`, or None."""
    found = _by_address.get(address)
    return None if found is None or found.is_closed else found


def agree_on_size(mesh: Connected, nbytes: int, what: str, timeout: float) -> None:
    """Checks the size of a window before it is made. Collective.

    Args:
        mesh: The ranks that share the window.
        nbytes: Size of each rank's part in bytes.
        what: What the ranks are doing, for error messages.
        timeout: Seconds to wait for the other ranks.

    Raises:
        InvalidArgument: The size is not positive, or differs between ranks.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
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

    def __init__(
        self, mesh: Connected, maps: Sequence[Any], forget: Callable[[], None] | None = None
    ) -> None:
        """Takes all ranks' parts, `maps`, in rank order. drop() first calls `forget`."""
        # The buffers keep the mappings alive until drop(). An array that views this rank's part
        # keeps that mapping alive longer, so it stays valid after close().
        self._buffers = [abi.ffi.from_buffer(each, require_writable=True) for each in maps]
        self._forget = forget
        addresses = [int(abi.ffi.cast("uintptr_t", each)) for each in self._buffers]
        local = maps[mesh.rank]
        super().__init__(mesh, len(local), addresses, local)

    def clear(self) -> None:
        """See Window."""
        abi.ffi.memmove(self.local, b"\0" * self.nbytes, self.nbytes)

    def drop(self) -> None:
        """See Window."""
        if self._forget is not None:
            self._forget()
        self._buffers = []


def host_window(mesh: Connected, nbytes: int, what: str, timeout: float) -> HostWindow:
    """Makes a window of memfd segments. Collective; the arguments are those of agree_on_size().

    A segment lives as long as a process maps it or holds its descriptor. So a job that is killed
    leaves nothing behind.

    Raises:
        BackendError: The operating system refused the memory, or there is too little.
    """
    with mesh.together(what, timeout), ExitStack() as descriptors:
        agree_on_size(mesh, nbytes, what, timeout)
        memory.check_room(nbytes, mesh.world_size)
        with allowed("memfd_create"):
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
        with allowed("ftruncate"):
            os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise BackendError(
            f"a file of {nbytes} bytes is refused: {error}; `ulimit -f` limits windows too"
        ) from error
