"""The operations of a driver that kccl uses: devices, streams, copies, launches.

The table of the vendor's driver stands behind every function here. A failed call of the driver is a
DriverError that names the driver's function and error. Handles are integers.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..base.errors import BackendError
from .table import DriverError
from .vendors import (
    VENDORS,
    backend,
    backend_of,
    choose,
    driver_version,
    may_choose,
    named,
    table,
    vendor_of,
)

__all__ = [
    "VENDORS",
    "backend",
    "backend_of",
    "choose",
    "driver_version",
    "may_choose",
    "named",
    "table",
    "vendor_of",
]

# ---- Functions by the driver's own names, for programs -----------------------------------------


def call(name: str, *args: Any, note: str = "") -> Any:
    """Calls a function of the driver.

    Args:
        name: The driver's name of the function.
        *args: Its arguments, as the vendor's binding for Python takes them.
        note: A text for the error message: the argument that matters.

    Returns:
        None, its result, or a tuple of its results.

    Raises:
        BackendError: The function failed, or there is no driver.
    """
    return table().call(name, *args, note=note)


def attempt(name: str, *args: Any) -> int:
    """Calls a function of the driver that has no results; returns its error code."""
    return table().attempt(name, *args)


def error_text(name: str, code: int, note: str = "") -> str:
    """Returns the error message for function `name` and its error code."""
    return table().error_text(name, code, note)


def function_address(name: str, version: int = 0) -> int:
    """Returns the address of a driver's function, for callers in C.

    `version` is the version of the driver's interface that they know, as 12030 for CUDA 12.3; 0 for
    the driver's own.
    """
    return table().function_address(name, version)


def constant(name: str) -> Any:
    """Returns a constant, a member of an enumeration ("Enumeration.MEMBER") or a type of the
    driver.
    """
    return table().constant(name)


def attribute(ordinal: int, name: str) -> int:
    """Returns an attribute of a device by the driver's name, as in "MULTIPROCESSOR_COUNT"."""
    return table().attribute(ordinal, name)


# ---- Devices -----------------------------------------------------------------------------------


class _Current:
    """Context manager: makes a device current in this thread."""

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        table().push(self._context)

    def __exit__(self, *_: object) -> None:
        table().pop()


@dataclass(frozen=True)
class Device:
    """A GPU of this process.

    Attributes:
        ordinal: The device's number in this process.
        name: The product's name, as the driver gives it.
        uuid: The driver's identifier, which is the same in every process.
        arch: The architecture to compile for, as in "sm_90a".
        multiprocessors: Number of multiprocessors.
        shared_bytes: Most bytes of shared memory of a block.
        context: What Table.open_device() returned. On CUDA PyTorch and CuPy use this context too.
    """

    ordinal: int
    name: str
    uuid: str
    arch: str
    multiprocessors: int
    shared_bytes: int
    context: int = field(repr=False)

    def current(self) -> _Current:
        """Returns a context (`with device.current():`) in which this thread's calls go to the
        device.
        """
        return _Current(self.context)


def num_devices() -> int:
    """Returns the number of GPUs that this process may use."""
    gpu = table()
    return int(gpu.call(gpu.names.num_devices))


@lru_cache(maxsize=64)
def device(ordinal: int) -> Device:
    """Returns a device by its number; its context lives as long as the process.

    Raises:
        BackendError: There is no such device, or it is too old.
    """
    gpu = table()
    return Device(
        ordinal,
        gpu.device_name(ordinal),
        gpu.device_uuid(ordinal),
        gpu.device_arch(ordinal),
        gpu.attribute(ordinal, gpu.multiprocessors),
        gpu.attribute(ordinal, gpu.shared_bytes),
        gpu.open_device(ordinal),
    )


def uuid(ordinal: int) -> str:
    """Returns an identifier of a device that is the same in every process."""
    return table().device_uuid(ordinal)


def pick_device(local_rank: int) -> Device:
    """Returns the device that this thread has made current. If there is none, returns the device
    whose number is `local_rank`, modulo the number of devices.
    """
    gpu = table()
    if gpu.has_current():
        return device(int(gpu.call(gpu.names.current_ordinal)))
    count = num_devices()
    if count == 0:
        raise BackendError(f"there is no GPU ({gpu.visible_devices}?). {gpu.cure}")
    return device(local_rank % count)


def can_access(ordinal: int, other: int) -> bool:
    """Tells whether a device can read and write another's memory."""
    gpu = table()
    return ordinal == other or bool(gpu.call(gpu.names.can_access, ordinal, other))


# ---- Streams and copies ------------------------------------------------------------------------


def legacy_stream() -> int:
    """Returns the default stream of each device. It and blocking streams wait for each other."""
    return table().legacy_stream


def make_stream() -> int:
    """Returns a new stream of the current device, which waits for no other stream. It lives as long
    as the context.
    """
    gpu = table()
    return int(gpu.call(gpu.names.create_stream, gpu.stream_flags))


def write(to: int, data: Any, stream: int) -> None:
    """Writes bytes to device memory, this rank's or a peer's, and waits until they are written.

    Args:
        to: Address.
        data: bytes, or another buffer of single bytes, as a NumPy array of uint8.
        stream: The stream that does the copy.
    """
    gpu = table()
    note = f"of {len(data)} bytes"
    gpu.call(gpu.names.copy_to_device, to, data, len(data), stream, note=note)
    synchronize_stream(stream)


def read(address: int, num_bytes: int, stream: int) -> bytes:
    """Returns bytes of device memory."""
    data = bytearray(num_bytes)
    read_into(data, address, stream)
    return bytes(data)


def read_into(data: Any, address: int, stream: int) -> None:
    """Fills a writable buffer of single bytes, as of a bytearray, from device memory."""
    gpu = table()
    note = f"of {len(data)} bytes"
    gpu.call(gpu.names.copy_to_host, data, address, len(data), stream, note=note)
    synchronize_stream(stream)


def fill(address: int, byte: int, num_bytes: int, stream: int) -> None:
    """Sets `num_bytes` bytes of device memory to `byte`, and waits until they are written."""
    gpu = table()
    gpu.call(gpu.names.fill, address, byte, num_bytes, stream)
    synchronize_stream(stream)


def synchronize_stream(stream: int) -> None:
    """Waits for everything that was launched on a stream of the current device."""
    gpu = table()
    gpu.call(gpu.names.synchronize_stream, stream)


def has_finished(stream: int) -> bool:
    """Tells whether everything that was launched on a stream has run. Does not wait.

    Raises:
        DriverError: Some of it has failed.
    """
    gpu = table()
    code = gpu.attempt(gpu.names.query_stream, stream)
    if code not in (0, gpu.not_ready):
        raise DriverError(gpu.error_text(gpu.names.query_stream, code), code)
    return code == 0


def synchronize(where: Device) -> None:
    """Waits for everything that was launched on a device."""
    gpu = table()
    with where.current():
        gpu.call(gpu.names.synchronize_device)


def synchronize_within(where: Device, seconds: float) -> bool:
    """Does synchronize() for at most `seconds`. Returns False if the device's work has not ended
    then.

    A new thread waits, because the driver's function has no timeout. That thread ends with the
    device's work.
    """
    errors: list[BackendError] = []
    is_over = threading.Event()

    def wait() -> None:
        try:
            synchronize(where)
        except BackendError as error:
            errors.append(error)
        finally:
            is_over.set()

    threading.Thread(target=wait, name="kccl synchronize", daemon=True).start()
    if not is_over.wait(seconds):
        return False
    if errors:
        raise errors[0]
    return True


def intervals_us(stream: int, parts: Sequence[Callable[[], None]]) -> list[float]:
    """Returns the microseconds that a stream of the current device takes for what each part
    enqueues.

    The parts follow each other without a pause. Waits for the end of the last one.
    """
    gpu, names = table(), table().names
    events: list[Any] = []
    try:
        for _ in range(len(parts) + 1):
            events.append(gpu.call(names.create_event, 0))
        gpu.call(names.record_event, events[0], stream)
        for part, event in zip(parts, events[1:], strict=True):
            part()
            gpu.call(names.record_event, event, stream)
        gpu.call(names.synchronize_event, events[-1])
        return [float(gpu.call(names.elapsed_ms, *pair)) * 1e3 for pair in pairwise(events)]
    finally:
        for event in events:
            gpu.attempt(names.destroy_event, event)


# ---- Captures, and what releases memory meanwhile ----------------------------------------------


def begin_capture(stream: int) -> None:
    """Begins to capture a stream into a graph. Forbids unsafe calls in this thread only."""
    gpu = table()
    gpu.call(gpu.names.begin_capture, stream, gpu.constant(gpu.capture_mode))


# Functions that drain() calls. Each waits until the module that added it has released memory.
drains: list[Callable[[], None]] = []


def drain() -> None:
    """Waits until memory that was dropped is released, for ten seconds at most.

    Call it before a capture: a release waits for the device, which would end the capture.
    """
    for each in drains:
        each()


@contextmanager
def uncaptured() -> Iterator[None]:
    """Returns a context in which this thread may load code while a stream is being captured."""
    gpu = table()
    before = gpu.relax_captures()
    try:
        yield
    finally:
        gpu.restore_captures(before)


# ---- Kernels -----------------------------------------------------------------------------------


def resident_blocks(handle: int, block: int, shared_bytes: int) -> int:
    """Returns the occupancy of a function: the blocks that one multiprocessor runs at once."""
    gpu = table()
    return int(gpu.call(gpu.names.resident_blocks, handle, block, shared_bytes))


def launch(
    handle: int,
    arguments: Sequence[bytes],
    *,
    grid: int,
    block: int,
    shared_bytes: int,
    stream: int,
    cooperative: bool = False,
) -> None:
    """Enqueues a kernel on a stream of the current device.

    Args:
        handle: The kernel's function on that device.
        arguments: Bytes of each argument; they are copied.
        grid, block: Number of blocks, and threads of each.
        shared_bytes: Dynamic shared memory of each block.
        stream: Handle of the stream.
        cooperative: For kernels that use CUDA's cooperative groups. Kernels that wait for other
            blocks by kccl's means need no such launch.
    """
    gpu = table()
    values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
    addresses = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
    note = f"with {grid} blocks of {block} threads, {shared_bytes} bytes of shared memory"
    shape = (grid, 1, 1, block, 1, 1, shared_bytes)
    where = ctypes.addressof(addresses)
    if cooperative:
        if not gpu.names.launch_cooperative:
            raise BackendError(f"kccl makes no cooperative launches on GPUs of {gpu.vendor}")
        gpu.call(gpu.names.launch_cooperative, handle, *shape, stream, where, note=note)
    else:
        gpu.call(gpu.names.launch, handle, *shape, stream, where, 0, note=note)
