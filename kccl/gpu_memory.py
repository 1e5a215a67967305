"""Memory for GPUs, and symmetric windows in it.

Between processes a window travels as a descriptor, and each process maps each part. Threads of one
process share one mapping, which every device may access. Either way a peer that dies takes nothing
with it: the memory lives until the last who maps it lets go.
"""

import ctypes
import json
import os
import queue
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from . import dtypes, gpu
from .device_arrays import DeviceArray
from .errors import BackendError
from .memory import Window
from .mesh import Mesh

_PINNED_FLAGS = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP

_Undo = tuple[tuple[str, tuple[Any, ...]], ...]


class Memory:
    """Plain memory of the current device, or pinned host memory that all devices map.

    Attributes:
        address: The same on host and devices.
        nbytes: Size in bytes; zero at first.
    """

    def __init__(
        self, where: gpu.Device, nbytes: int, stream: int, *, on_host: bool = False
    ) -> None:
        """Allocates; `stream` is for writing the zeros."""
        self.nbytes = nbytes
        with where.current():
            if on_host:
                self.address = int(gpu.call("cuMemHostAlloc", nbytes, _PINNED_FLAGS))
                ctypes.memset(self.address, 0, nbytes)
            else:
                self.address = int(gpu.call("cuMemAlloc", nbytes, note=f"of {nbytes} bytes"))
                gpu.fill(self.address, 0, nbytes, stream)
        name = "cuMemFreeHost" if on_host else "cuMemFree"
        _at_end(self, where, ((name, (self.address,)),))


class Shareable:
    """Device memory with a mapping of its own, which other devices and processes can map too.

    Attributes:
        address: Where this process maps it.
        nbytes: Size, rounded up to what the driver maps.
        device: The device whose memory it is; of what was imported, the one that maps it.
    """

    def __init__(self, where: gpu.Device, nbytes: int, fd: int | None = None) -> None:
        """Allocates; with `fd`, maps what another process exported there.

        Raises:
            BackendError: The driver refused.
        """
        self.device = where
        kind = _fd_kind()
        prop = gpu.constant("CUmemAllocationProp")()
        prop.type = gpu.constant("CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED")
        prop.location = _location(where.ordinal)
        prop.requestedHandleTypes = kind
        flags = gpu.constant("CUmemAllocationGranularity_flags")
        best = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(gpu.call("cuMemGetAllocationGranularity", prop, best))
        self.nbytes = -(-nbytes // unit) * unit
        note = f"on device {where.ordinal}, {self.nbytes} bytes"
        undo: list[tuple[str, tuple[Any, ...]]] = []
        try:
            with where.current():
                if fd is None:
                    self._handle = gpu.call("cuMemCreate", self.nbytes, prop, 0, note=note)
                else:
                    self._handle = gpu.call("cuMemImportFromShareableHandle", fd, kind, note=note)
                undo.insert(0, ("cuMemRelease", (self._handle,)))
                place = gpu.call("cuMemAddressReserve", self.nbytes, unit, 0, 0, note=note)
                self.address = int(place)
                undo.insert(0, ("cuMemAddressFree", (self.address, self.nbytes)))
                gpu.call("cuMemMap", self.address, self.nbytes, 0, self._handle, 0, note=note)
                undo.insert(0, ("cuMemUnmap", (self.address, self.nbytes)))
                self.allow([where.ordinal])
        except BaseException:
            _undo(where, tuple(undo), os.getpid())
            raise
        _at_end(self, where, tuple(undo))

    def allow(self, ordinals: Sequence[int]) -> None:
        """Lets devices of this process read and write it."""
        access = []
        for ordinal in sorted({self.device.ordinal, *ordinals}):
            each = gpu.constant("CUmemAccessDesc")()
            each.location = _location(ordinal)
            each.flags = gpu.constant("CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            access.append(each)
        note = f"for devices {ordinals} on device {self.device.ordinal}"
        gpu.call("cuMemSetAccess", self.address, self.nbytes, access, len(access), note=note)

    def export(self) -> int:
        """A descriptor by which another process can map it; the caller closes it."""
        return int(gpu.call("cuMemExportToShareableHandle", self._handle, _fd_kind(), 0))


def _fd_kind() -> Any:
    return gpu.constant("CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")


def _location(ordinal: int) -> Any:
    location = gpu.constant("CUmemLocation")()
    location.type = gpu.constant("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE")
    location.id = ordinal
    return location


# What nobody owns any more: (device, calls, process).
_dropped: queue.SimpleQueue[tuple[gpu.Device, _Undo, int]] = queue.SimpleQueue()


def _at_end(owner: object, where: gpu.Device, calls: _Undo) -> None:
    """Makes the calls when `owner` is collected; the end of the process needs none."""
    _start_releasing(os.getpid())
    weakref.finalize(owner, _dropped.put, (where, calls, os.getpid())).atexit = False


# Why in a thread: what was launched may still use the memory, so its device is waited for, and any
# thread may be the one that collects: also the one that a kernel of another rank is waiting for.
@cache
def _start_releasing(_pid: int) -> None:
    threading.Thread(target=_release, name="kccl-release", daemon=True).start()


def _release() -> None:
    while True:
        _undo(*_dropped.get())


def _undo(where: gpu.Device, calls: _Undo, pid: int) -> None:
    # Nobody hears of an error here; a forked child has no context.
    if os.getpid() != pid:
        return
    gpu.attempt("cuCtxPushCurrent", where.context)
    gpu.attempt("cuCtxSynchronize")
    for name, args in calls:
        gpu.attempt(name, *args)
    gpu.attempt("cuCtxPopCurrent")


# ---- Windows ---------------------------------------------------------------------------------

# Parts that threads of this process hand each other, by address.
_handed: dict[int, "Shareable"] = {}


class GpuWindow(Window):
    """Memory of the same size on every rank's device, mapped by all ranks; `local` is None."""

    def __init__(
        self,
        mesh: Mesh,
        nbytes: int,
        what: str,
        timeout: float,
        *,
        device: gpu.Device,
        are_threads: bool,
        stream: int,
    ) -> None:
        """See Window.

        Args:
            mesh, nbytes, what, timeout: As there.
            device: This rank's.
            are_threads: All ranks are threads of this process.
            stream: For writing zeros.
        """
        self._device = device
        self._are_threads = are_threads
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
            gpu.fill(address, byte, self.nbytes - begin, self._stream)

    def _attach(self, what: str, timeout: float) -> None:
        mine = Shareable(self._device, self.nbytes)
        with self._device.current():
            # Before anybody else can write.
            gpu.fill(mine.address, 0, self.nbytes, self._stream)
        share = self._with_threads if self._are_threads else self._with_processes
        self._parts = share(mine, what, timeout)
        self.addresses = tuple(part.address for part in self._parts)
        self.local: Any = None

    def _with_threads(self, mine: Shareable, what: str, timeout: float) -> list[Shareable]:
        _handed[mine.address] = mine
        message = json.dumps([mine.address, self._device.ordinal]).encode()
        try:
            replies = self.mesh.allgather(message, what, timeout)
            everyone = [json.loads(reply) for reply in replies]
            mine.allow([ordinal for _, ordinal in everyone])
            parts = [_handed[address] for address, _ in everyone]
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


def check_reach(mesh: Mesh, device: gpu.Device, timeout: float) -> list[str]:
    """Checks that this rank's device can reach every rank's. Collective.

    Returns:
        Each rank's device in words.

    Raises:
        BackendError: Two devices cannot access each other's memory.
    """
    if not gpu.attribute(device.ordinal, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        raise BackendError(
            f"device {device.ordinal} ({device.name}) cannot export memory as file descriptors; "
            'windows need that. Use backend="host"'
        )
    replies = mesh.allgather(json.dumps([device.uuid, device.name]).encode(), "start-up", timeout)
    everyone = [json.loads(reply) for reply in replies]
    known = {gpu.uuid(ordinal): ordinal for ordinal in range(gpu.num_devices())}
    for peer, (uuid, name) in enumerate(everyone):
        # A device that this process does not see is tried all the same.
        if uuid in known and not gpu.can_access(device.ordinal, known[uuid]):
            raise BackendError(
                f"rank {mesh.rank} on device {device.ordinal} ({device.name}) cannot access the "
                f"memory of rank {peer} on device {known[uuid]} ({name}): there is no peer-to-peer "
                'path between them. Use backend="host"'
            )
    return [name for _, name in everyone]
