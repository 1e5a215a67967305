"""Memory for GPUs, and symmetric windows in it.

There are three ways to share a window, of which sharing.py chooses one:

    vmm   Memory with a mapping of its own. Between processes it travels as a file descriptor, and
          each process maps each part. Threads of one process share one mapping, which every device
          may access. A peer that dies takes nothing with it: the memory lives as long as somebody
          maps it.
    ipc   Between processes the memory travels as a legacy IPC handle. It is freed when its owner
          ends.
    peer  Threads of one process reach plain memory by peer access between their devices.
"""

import contextlib
import ctypes
import json
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from ..base import dtypes
from ..base.errors import BackendError
from ..ranks.sockets import peer_lost
from ..ranks.team import Connected
from ..ranks.windows import Window, agree_on_size
from . import driver, release
from .arrays import DeviceArray
from .table import DriverError

_IPC_UNIT = 2 << 20
_streams: dict[tuple[driver.Device, str], int] = {}


def shared_stream(where: driver.Device, work: Literal["writes", "fills"]) -> int:
    """Returns the stream on which all communicators of this process do one kind of work on a
    device.

    Copy engines do the writes, so writes reach a GPU that is full of kernels. Fills may be kernels,
    which wait for room. A communicator has no streams of its own: on an H200 every kernel of a
    context begins later once the context has used 16 streams (bench/LOG.md).
    """
    found = _streams.get((where, work))
    if found is None:
        with where.current():
            made = driver.make_stream()
            # No lock is held, because the driver may wait for the device. So another thread of a
            # rank that shares the device may have made a stream meanwhile, which is used instead.
            found = _streams.setdefault((where, work), made)
            if found != made:
                driver.table().attempt(driver.table().names.destroy_stream, made)
    return found


class Memory:
    """Plain memory of a device, or pinned host memory that all devices map.

    Attributes:
        address: The address, which is the same on host and devices.
        nbytes: Size in bytes.
    """

    def __init__(
        self, where: driver.Device, nbytes: int, stream: int | None, *, on_host: bool = False
    ) -> None:
        """Allocates the memory, and writes zeros on `stream`. If that is None, the memory keeps
        what it holds, and clear() must not be called.
        """
        gpu, names = driver.table(), driver.table().names
        self.nbytes = nbytes
        self._where = where
        self._stream = stream
        with where.current():
            if on_host:
                self.address = int(gpu.call(names.allocate_on_host, nbytes, gpu.host_flags))
                ctypes.memset(self.address, 0, nbytes)
            else:
                note = f"of {nbytes} bytes"
                self.address = _with_room(partial(gpu.allocate, nbytes, note))
                if stream is not None:
                    driver.fill(self.address, 0, nbytes, stream)
        name = names.free_on_host if on_host else names.free
        release.at_end(self, where, ((name, (self.address,)),), [where])

    def clear(self) -> None:
        """Writes zeros over memory of a device."""
        assert self._stream is not None
        with self._where.current():
            driver.fill(self.address, 0, self.nbytes, self._stream)


class Shareable:
    """Device memory with a mapping of its own, which other devices and processes can map too.

    Attributes:
        address: The address at which this process maps the memory.
        nbytes: Size in bytes, rounded up to what the driver maps.
        device: The device whose memory this is. For imported memory, the device that maps it.
    """

    def __init__(self, where: driver.Device, nbytes: int, fd: int | None = None) -> None:
        """Allocates memory, or maps the memory that another process exported as `fd`.

        Raises:
            BackendError: The driver refused.
        """
        gpu, names = driver.table(), driver.table().names
        self.device = where
        # The devices that may access the memory; `where` is the last one. They are waited for
        # before the memory is freed, because their kernels may still use it.
        self._users = [where]
        kind = gpu.memory_kind(where.ordinal)
        unit = gpu.memory_unit(kind)
        self.nbytes = -(-nbytes // unit) * unit
        note = f"on device {where.ordinal}, {self.nbytes} bytes"
        undo: list[tuple[str, tuple[Any, ...]]] = []
        try:
            with where.current():
                if fd is None:
                    create = partial(gpu.call, names.create_memory, note=note)
                    self._memory = _with_room(partial(create, self.nbytes, kind, 0))
                else:
                    self._memory = gpu.import_memory(fd, note)
                undo.insert(0, (names.release_memory, (self._memory,)))
                reserved = gpu.call(names.reserve_addresses, self.nbytes, unit, 0, 0, note=note)
                self.address = int(reserved)
                undo.insert(0, (names.free_addresses, (self.address, self.nbytes)))
                mapped = self.address, self.nbytes, 0, self._memory, 0
                gpu.call(names.map_memory, *mapped, note=note)
                undo.insert(0, (names.unmap_memory, (self.address, self.nbytes)))
                self.allow([where.ordinal])
        except BaseException:
            # Ignores errors here, because the first error is the one to raise.
            with contextlib.suppress(BackendError):
                release.undo(where, tuple(undo), os.getpid())
            raise
        release.at_end(self, where, tuple(undo), self._users)

    def allow(self, ordinals: Sequence[int]) -> None:
        """Lets devices of this process read and write the memory."""
        everyone = sorted({self.device.ordinal, *ordinals})
        note = f"for devices {ordinals} on device {self.device.ordinal}"
        others = [driver.device(each) for each in everyone if each != self.device.ordinal]
        self._users[:0] = others
        driver.table().allow_access(self.address, self.nbytes, everyone, note)

    def has_no_users(self) -> None:
        """Notes that no kernel uses the memory any more, so that freeing it waits for no device."""
        self._users.clear()

    def export(self) -> int:
        """Returns a file descriptor by which another process can map the memory. The caller closes
        it.
        """
        return driver.table().export_memory(self._memory)


class Plain:
    """Plain device memory, for peers with an IPC handle or with peer access.

    Attributes:
        address, nbytes, device: As in Shareable.
    """

    def __init__(self, where: driver.Device, nbytes: int, *, is_exported: bool) -> None:
        """Allocates. Exported memory stays until the process ends, except after
        free_when_dropped().
        """
        gpu = driver.table()
        self.device = where
        self._users = [where]  # as in Shareable
        # Sizes are rounded up, because the driver puts smaller allocations together, and one handle
        # opens them all.
        self.nbytes = -(-nbytes // _IPC_UNIT) * _IPC_UNIT
        note = f"on device {where.ordinal}, {self.nbytes} bytes"
        with where.current():
            self.address = _with_room(partial(gpu.allocate, self.nbytes, note))
        # Exported memory is not freed: that is undefined while a peer has it open, and peers do not
        # tell when they have closed it.
        if not is_exported:
            self.free_when_dropped()

    def free_when_dropped(self) -> None:
        """Frees the memory when this object is dropped. Called if no other process has it open."""
        calls = ((driver.table().names.free, (self.address,)),)
        release.at_end(self, self.device, calls, self._users)

    def allow(self, ordinals: Sequence[int]) -> None:
        """Lets devices of this process read and write the memory."""
        gpu, name = driver.table(), driver.table().names.enable_access
        for ordinal in sorted({*ordinals} - {self.device.ordinal}):
            self._users.insert(0, driver.device(ordinal))
            with driver.device(ordinal).current():
                code = gpu.attempt(name, self.device.context, 0)
            if code not in (0, gpu.is_accessible):
                note = f"for device {ordinal} on device {self.device.ordinal}"
                raise DriverError(gpu.error_text(name, code, note), code)

    def has_no_users(self) -> None:
        """Notes that no kernel uses the memory any more, so that freeing it waits for no device."""
        self._users.clear()

    def export(self) -> bytes:
        """Returns a handle by which another process can open the memory."""
        with self.device.current():
            return driver.table().export_handle(self.address)


class Opened:
    """Another process's Plain memory.

    Attributes:
        address: The address at which this process maps the memory.
    """

    def __init__(self, where: driver.Device, handle: bytes, peer: int) -> None:
        """Opens what rank `peer` exported.

        Raises:
            BackendError: The driver refused.
        """
        gpu = driver.table()
        note = f"of rank {peer} on device {where.ordinal}"
        with where.current():
            self.address = gpu.open_handle(handle, note)
        self._where = where
        self._calls = ((gpu.names.close_handle, (self.address,)),)
        self._closing = release.at_end(self, where, self._calls, [where])

    def close(self) -> None:
        """Closes the memory at once. Called when no kernel has used it."""
        if self._closing.detach() is not None:
            # The memory is closed because something has failed. That error is the one to raise, so
            # errors here are ignored.
            with contextlib.suppress(BackendError):
                release.undo(self._where, self._calls, os.getpid())


def _with_room(allocate: Callable[[], Any]) -> Any:
    """Returns what `allocate` returns. If there is too little memory, waits until dropped memory is
    released, and calls `allocate` once more.
    """
    try:
        return allocate()
    except DriverError as error:
        if error.code != driver.table().out_of_memory:
            raise
        # A kernel that never ends keeps its memory; then the second attempt fails too.
        release.drain()
        return allocate()


# ---- Windows ---------------------------------------------------------------------------------

# Address -> a part of a window, by which threads of this process give each other their parts.
_handed: dict[int, "Shareable | Plain"] = {}
# Keeps exported parts of windows that could not be made, until all peers are known to have closed
# them.
_given_up: "weakref.WeakKeyDictionary[Connected, list[Plain]]" = weakref.WeakKeyDictionary()


class GpuWindow(Window):
    """Memory of the same size on every rank's device, mapped by all ranks."""

    def __init__(
        self,
        mesh: Connected,
        nbytes: int,
        what: str,
        timeout: float,
        *,
        device: driver.Device,
        are_threads: bool,
        way: str,
        stream: int,
    ) -> None:
        """Allocates this rank's part and maps all parts. Collective.

        Args:
            mesh, nbytes, what, timeout: See windows.agree_on_size().
            device: This rank's GPU.
            are_threads: All ranks are threads of this process.
            way: "vmm", "ipc" or "peer"; the same on all ranks.
            stream: The stream that writes zeros.
        """
        self._device = device
        self._stream = stream
        self._views: weakref.WeakSet[DeviceArray] = weakref.WeakSet()
        self._parts: Sequence[Shareable | Plain | Opened]
        with mesh.together(what, timeout):
            agree_on_size(mesh, nbytes, what, timeout)
            # A rank that takes part in this call has left earlier calls, and closed what it opened
            # there. So parts of failed calls can be freed.
            for part in _given_up.pop(mesh, []):
                part.free_when_dropped()
            mine: Shareable | Plain
            if way == "vmm":
                mine = Shareable(device, nbytes)
            else:
                mine = Plain(device, nbytes, is_exported=way == "ipc")
            with device.current():
                # Writes the zeros before any peer can write.
                driver.fill(mine.address, 0, nbytes, stream)
            if are_threads:
                self._parts = _with_threads(mesh, mine, what, timeout)
            elif isinstance(mine, Shareable):
                self._parts = _with_processes(mesh, mine, what, timeout)
            else:
                self._parts = _by_handles(mesh, mine, what, timeout)
        super().__init__(mesh, nbytes, [part.address for part in self._parts], None)

    def array(self, shape: tuple[int, ...], dtype: dtypes.Dtype) -> DeviceArray:
        """Returns this rank's part, from its beginning, as an array."""
        address = self.addresses[self.mesh.rank]
        # The parts outlive the window's close() as long as an array views them.
        keep = self, self._parts
        view = DeviceArray(address, shape, dtype, self._device.ordinal, keep)
        self._views.add(view)
        return view

    def clear(self) -> None:
        """See Window."""
        self.fill(0, 0)

    def drop(self) -> None:
        """See Window. Does not wait for kernels that run on other ranks' GPUs."""
        mine = self._parts[self.mesh.rank]
        if not self._views and not isinstance(mine, Opened):
            mine.has_no_users()
        del mine
        self._parts = ()
        release.drain(self._device)

    def fill(self, begin: int, byte: int) -> None:
        """Sets all bytes of this rank's part from `begin` to the end to `byte`."""
        address = self.addresses[self.mesh.rank] + begin
        with self._device.current():
            driver.fill(address, byte, self.nbytes - begin, self._stream)


def _with_threads(
    mesh: Connected, mine: Shareable | Plain, what: str, timeout: float
) -> list[Shareable | Plain]:
    _handed[mine.address] = mine
    message = json.dumps([mine.address, mine.device.ordinal]).encode()
    try:
        replies = mesh.allgather(message, what, timeout)
        everyone = [json.loads(reply) for reply in replies]
        mine.allow([ordinal for _, ordinal in everyone])
        parts = []
        for rank, (address, _) in enumerate(everyone):
            # A part is missing in _handed if its rank has failed meanwhile.
            if address not in _handed:
                raise peer_lost(mesh.rank, rank, what)
            parts.append(_handed[address])
        # The parts stay in _handed until every rank has found them and may access them.
        mesh.allgather(b"", what, timeout)
    finally:
        del _handed[mine.address]
    return parts


def _with_processes(mesh: Connected, mine: Shareable, what: str, timeout: float) -> list[Shareable]:
    with contextlib.ExitStack() as descriptors:
        fd = mine.export()
        descriptors.callback(os.close, fd)
        fds = mesh.exchange_fds(fd, what, timeout)
        for each in fds.values():
            descriptors.callback(os.close, each)
        return [
            mine if rank == mesh.rank else Shareable(mine.device, mine.nbytes, fds[rank])
            for rank in range(mesh.world_size)
        ]


def _by_handles(mesh: Connected, mine: Plain, what: str, timeout: float) -> list[Plain | Opened]:
    with contextlib.ExitStack() as undo:
        undo.callback(_given_up.setdefault(mesh, []).append, mine)
        replies = mesh.allgather(mine.export(), what, timeout)
        parts: list[Plain | Opened] = []
        for rank, handle in enumerate(replies):
            if rank == mesh.rank:
                parts.append(mine)
                continue
            opened = Opened(mine.device, handle, rank)
            undo.callback(opened.close)
            parts.append(opened)
        # Before this exchange no rank has returned the window. After it a peer may use the window,
        # so from here on nothing is undone.
        mesh.allgather(b"", what, timeout)
        undo.pop_all()
    return parts
