"""Memory for GPUs, and symmetric windows in it.

There are three ways, of which gpu_sharing.py chooses one:

    vmm   between processes a window travels as a descriptor, and each process maps each part;
          threads of one process share one mapping, which every device may access. A peer that dies
          takes nothing with it: the memory lives until the last who maps it lets go.
    ipc   between processes it travels as a legacy IPC handle. Its memory goes with its owner.
    peer  threads of one process reach plain memory by peer access between their devices.
"""

import ctypes
import json
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal

from ..base import dtypes
from ..ranks.mesh import Mesh
from ..ranks.sockets import peer_lost
from ..ranks.windows import Window
from . import driver, release
from .arrays import DeviceArray

_IPC_UNIT = 2 << 20
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PEER_ACCESS_ALREADY_ENABLED = 704
_PINNED_FLAGS = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_streams: dict[tuple[driver.Device, str], int] = {}
_lock = threading.Lock()


def shared_stream(where: driver.Device, work: Literal["writes", "fills"]) -> int:
    """The stream on which all communicators of this process do one kind of work on a device.

    Writes go by copy engine, so they reach a GPU that kernels fill; fills may be kernels, which
    wait for room. Not a stream for each communicator: on an H200 every kernel of a context begins
    later once the context has used 16 of them (bench/LOG.md).
    """
    with _lock:
        if (where, work) not in _streams:
            with where.current():
                _streams[where, work] = driver.make_stream()
        return _streams[where, work]


class Memory:
    """Plain memory of the current device, or pinned host memory that all devices map.

    Attributes:
        address: The same on host and devices.
        nbytes: Size in bytes; zero at first.
    """

    def __init__(
        self, where: driver.Device, nbytes: int, stream: int, *, on_host: bool = False
    ) -> None:
        """Allocates; `stream` is for writing the zeros."""
        self.nbytes = nbytes
        with where.current():
            if on_host:
                self.address = int(driver.call("cuMemHostAlloc", nbytes, _PINNED_FLAGS))
                ctypes.memset(self.address, 0, nbytes)
            else:
                self.address = int(_allocate("cuMemAlloc", nbytes, note=f"of {nbytes} bytes"))
                driver.fill(self.address, 0, nbytes, stream)
        name = "cuMemFreeHost" if on_host else "cuMemFree"
        release.at_end(self, where, ((name, (self.address,)),))


class Shareable:
    """Device memory with a mapping of its own, which other devices and processes can map too.

    Attributes:
        address: Where this process maps it.
        nbytes: Size, rounded up to what the driver maps.
        device: The device whose memory it is; of what was imported, the one that maps it.
    """

    def __init__(self, where: driver.Device, nbytes: int, fd: int | None = None) -> None:
        """Allocates; with `fd`, maps what another process exported there.

        Raises:
            BackendError: The driver refused.
        """
        self.device = where
        kind = _fd_kind()
        prop = driver.constant("CUmemAllocationProp")()
        prop.type = driver.constant("CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED")
        prop.location = _location(where.ordinal)
        prop.requestedHandleTypes = kind
        flags = driver.constant("CUmemAllocationGranularity_flags")
        best = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(driver.call("cuMemGetAllocationGranularity", prop, best))
        self.nbytes = -(-nbytes // unit) * unit
        note = f"on device {where.ordinal}, {self.nbytes} bytes"
        undo: list[tuple[str, tuple[Any, ...]]] = []
        try:
            with where.current():
                if fd is None:
                    self._handle = _allocate("cuMemCreate", self.nbytes, prop, 0, note=note)
                else:
                    self._handle = driver.call(
                        "cuMemImportFromShareableHandle", fd, kind, note=note
                    )
                undo.insert(0, ("cuMemRelease", (self._handle,)))
                place = driver.call("cuMemAddressReserve", self.nbytes, unit, 0, 0, note=note)
                self.address = int(place)
                undo.insert(0, ("cuMemAddressFree", (self.address, self.nbytes)))
                driver.call("cuMemMap", self.address, self.nbytes, 0, self._handle, 0, note=note)
                undo.insert(0, ("cuMemUnmap", (self.address, self.nbytes)))
                self.allow([where.ordinal])
        except BaseException:
            release.undo(where, tuple(undo), os.getpid())
            raise
        release.at_end(self, where, tuple(undo))

    def allow(self, ordinals: Sequence[int]) -> None:
        """Lets devices of this process read and write it."""
        access = []
        for ordinal in sorted({self.device.ordinal, *ordinals}):
            each = driver.constant("CUmemAccessDesc")()
            each.location = _location(ordinal)
            each.flags = driver.constant("CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            access.append(each)
        note = f"for devices {ordinals} on device {self.device.ordinal}"
        driver.call("cuMemSetAccess", self.address, self.nbytes, access, len(access), note=note)

    def export(self) -> int:
        """A descriptor by which another process can map it; the caller closes it."""
        return int(driver.call("cuMemExportToShareableHandle", self._handle, _fd_kind(), 0))


class Plain:
    """Device memory by cuMemAlloc, for peers with an IPC handle or with peer access.

    Attributes:
        address, nbytes, device: As in Shareable.
    """

    def __init__(self, where: driver.Device, nbytes: int, *, is_exported: bool) -> None:
        """Allocates. What is exported stays until the process ends."""
        self.device = where
        # Why rounded up: smaller allocations share one of the driver's, which a handle opens whole.
        self.nbytes = -(-nbytes // _IPC_UNIT) * _IPC_UNIT
        note = f"on device {where.ordinal}, {self.nbytes} bytes"
        with where.current():
            self.address = int(_allocate("cuMemAlloc", self.nbytes, note=note))
        # Freeing it while a peer has it open is undefined, and nobody says when all have closed it.
        if not is_exported:
            release.at_end(self, where, (("cuMemFree", (self.address,)),))

    def allow(self, ordinals: Sequence[int]) -> None:
        """Lets devices of this process read and write it."""
        for ordinal in sorted({*ordinals} - {self.device.ordinal}):
            with driver.device(ordinal).current():
                code = driver.attempt("cuCtxEnablePeerAccess", self.device.context, 0)
            if code not in (0, _PEER_ACCESS_ALREADY_ENABLED):
                note = f"for device {ordinal} on device {self.device.ordinal}"
                raise driver.DriverError(
                    driver.error_text("cuCtxEnablePeerAccess", code, note), code
                )

    def export(self) -> bytes:
        """A handle by which another process can open it."""
        with self.device.current():
            return bytes(driver.call("cuIpcGetMemHandle", self.address).reserved)


class Opened:
    """Another process's Plain memory.

    Attributes:
        address: Where this process maps it.
    """

    def __init__(self, where: driver.Device, handle: bytes, peer: int) -> None:
        """Opens what rank `peer` exported.

        Raises:
            BackendError: The driver refused.
        """
        made = driver.constant("CUipcMemHandle")()
        made.reserved = handle
        note = f"of rank {peer} on device {where.ordinal}"
        with where.current():
            opened = driver.call("cuIpcOpenMemHandle", made, _LAZY_PEER_ACCESS, note=note)
        self.address = int(opened)
        release.at_end(self, where, (("cuIpcCloseMemHandle", (self.address,)),))


def _fd_kind() -> Any:
    return driver.constant("CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")


def _location(ordinal: int) -> Any:
    location = driver.constant("CUmemLocation")()
    location.type = driver.constant("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE")
    location.id = ordinal
    return location


def _allocate(name: str, *args: Any, note: str) -> Any:
    """gpu.call(); where there is too little memory, once more when what was dropped is released."""
    try:
        return driver.call(name, *args, note=note)
    except driver.DriverError as error:
        if error.code != driver.OUT_OF_MEMORY:
            raise
        # A kernel that never ends keeps its memory; then the second attempt says so.
        release.drain()
        return driver.call(name, *args, note=note)


# ---- Windows ---------------------------------------------------------------------------------

# Parts that threads of this process hand each other, by address.
_handed: dict[int, "Shareable | Plain"] = {}


class GpuWindow(Window):
    """Memory of the same size on every rank's device, mapped by all ranks; `local` is None."""

    def __init__(
        self,
        mesh: Mesh,
        nbytes: int,
        what: str,
        timeout: float,
        *,
        device: driver.Device,
        are_threads: bool,
        way: str,
        stream: int,
    ) -> None:
        """See Window.

        Args:
            mesh, nbytes, what, timeout: As there.
            device: This rank's.
            are_threads: All ranks are threads of this process.
            way: "vmm", "ipc" or "peer"; the same on all ranks.
            stream: For writing zeros.
        """
        self._device = device
        self._are_threads = are_threads
        self._way = way
        self._stream = stream
        super().__init__(mesh, nbytes, what, timeout)

    def array(self, shape: tuple[int, ...], dtype: dtypes.Dtype) -> DeviceArray:
        """This rank's part, from its beginning, as an array."""
        address = self.addresses[self.mesh.rank]
        return DeviceArray(address, shape, dtype, self._device.ordinal, self)

    def clear(self) -> None:
        """See Window."""
        self.fill(0, 0)

    def fill(self, begin: int, byte: int) -> None:
        """Writes one byte value over this rank's part, from `begin` to the end."""
        address = self.addresses[self.mesh.rank] + begin
        with self._device.current():
            driver.fill(address, byte, self.nbytes - begin, self._stream)

    def _attach(self, what: str, timeout: float) -> None:
        mine: Shareable | Plain
        if self._way == "vmm":
            mine = Shareable(self._device, self.nbytes)
        else:
            mine = Plain(self._device, self.nbytes, is_exported=self._way == "ipc")
        with self._device.current():
            # Before anybody else can write.
            driver.fill(mine.address, 0, self.nbytes, self._stream)
        if self._are_threads:
            self._parts: Sequence[Shareable | Plain | Opened]
            self._parts = self._with_threads(mine, what, timeout)
        elif isinstance(mine, Shareable):
            self._parts = self._with_processes(mine, what, timeout)
        else:
            self._parts = self._by_handles(mine, what, timeout)
        self.addresses = tuple(part.address for part in self._parts)
        self.local: Any = None

    def _with_threads(
        self, mine: Shareable | Plain, what: str, timeout: float
    ) -> list[Shareable | Plain]:
        _handed[mine.address] = mine
        message = json.dumps([mine.address, self._device.ordinal]).encode()
        try:
            replies = self.mesh.allgather(message, what, timeout)
            everyone = [json.loads(reply) for reply in replies]
            mine.allow([ordinal for _, ordinal in everyone])
            parts = []
            for rank, (address, _) in enumerate(everyone):
                # Whoever has given up meanwhile has taken his part back.
                if address not in _handed:
                    raise peer_lost(self.mesh.rank, rank, what)
                parts.append(_handed[address])
            # Until all have been found here, and all may be accessed.
            self.mesh.allgather(b"", what, timeout)
        finally:
            del _handed[mine.address]
        return parts

    def _with_processes(self, mine: Shareable, what: str, timeout: float) -> list[Shareable]:
        fd = mine.export()
        fds = []
        try:
            fds = self.mesh.exchange_fds(fd, what, timeout)
            return [
                mine if rank == self.mesh.rank else Shareable(self._device, self.nbytes, each)
                for rank, each in enumerate(fds)
            ]
        finally:
            for each in (fd, *fds):
                os.close(each)

    def _by_handles(self, mine: Plain, what: str, timeout: float) -> list[Plain | Opened]:
        replies = self.mesh.allgather(mine.export(), what, timeout)
        return [
            mine if rank == self.mesh.rank else Opened(self._device, handle, rank)
            for rank, handle in enumerate(replies)
        ]
