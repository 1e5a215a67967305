"""NVIDIA's driver, through cuda.bindings: the one module that touches it.

Every function goes through call(), which turns an error code into a BackendError that names the
function and the code. Handles are integers everywhere else.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..base.errors import BackendError

LEGACY_STREAM = 1  # CU_STREAM_LEGACY, on every device
_CURE = "pip install 'kccl[cuda]', and NVIDIA's driver where the GPU is; or use backend=\"host\""
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
# What an oldest supported chip is, and from where on names of architectures end in "a".
_OLDEST, _FIRST_SPECIFIC = (8, 0), (9, 0)


OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY, a DriverError's code."""


class DriverError(BackendError):
    """A function of the driver refused.

    Attributes:
        code: Its error code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # As it comes out of a process that compiles.
        return type(self), (str(self), self.code)


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError(f"cuda.bindings cannot be imported: {error}. {_CURE}") from error
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:
        raise BackendError(f"NVIDIA's driver cannot be loaded: {error}. {_CURE}") from error
    if int(code) != 0:
        raise DriverError(f"cuInit failed: {code.name} ({int(code)}). {_CURE}", int(code))
    return driver


def call(name: str, *args: Any, note: str = "") -> Any:
    """Calls a function of the driver.

    Args:
        name: Of the function.
        *args: As cuda.bindings has them.
        note: What the error message adds: the argument that matters.

    Returns:
        None, its result, or a tuple of its results.

    Raises:
        BackendError: It failed, or is not there.
    """
    code, *results = getattr(_driver(), name)(*args)
    if int(code) != 0:
        raise DriverError(error_text(name, int(code), note), int(code))
    return results[0] if len(results) == 1 else tuple(results) or None


def attempt(name: str, *args: Any) -> int:
    """Calls a function of the driver that has no results; returns its error code."""
    return int(getattr(_driver(), name)(*args)[0])


def error_text(name: str, code: int, note: str = "") -> str:
    """What is said when function `name` returned an error code."""
    known = {int(each): each.name for each in _driver().CUresult}
    return f"{name} failed: {known.get(code, 'unknown error')} ({code}){note and ' ' + note}"


def function_address(name: str, version: int = 0) -> int:
    """Where a function of the driver lies, for callers in C; as of a version, as in 12030."""
    version = version or call("cuDriverGetVersion")
    address, _ = call("cuGetProcAddress", name.encode(), version, 0)
    return int(address)


def constant(name: str) -> Any:
    """A constant of the driver's header by its name."""
    driver = _driver()
    owner, _, member = name.partition(".")
    return getattr(getattr(driver, owner), member) if member else getattr(driver, owner)


# ---- Devices ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A GPU of this process, with its primary context, which PyTorch and CuPy use too.

    Attributes:
        ordinal: Its number in this process.
        name: As the driver says it.
        uuid: The same in every process.
        arch: What NVRTC compiles for, as in "sm_90a".
        multiprocessors: Their number.
        context: Address of the context.
    """

    ordinal: int
    name: str
    uuid: str
    arch: str
    multiprocessors: int
    context: int = field(repr=False)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, this thread's calls go to this device."""
        call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")


def num_devices() -> int:
    """GPUs that this process may use."""
    return int(call("cuDeviceGetCount"))


def attribute(ordinal: int, name: str) -> int:
    """A CU_DEVICE_ATTRIBUTE_... of a device, by the name behind that prefix."""
    which = constant(f"CUdevice_attribute.CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", which, ordinal))


@lru_cache(maxsize=64)
def device(ordinal: int) -> Device:
    """A device by its number; its context lives as long as the process.

    Raises:
        BackendError: There is none, or it is too old.
    """
    handle = call("cuDeviceGet", ordinal, note=f"for device {ordinal}")
    name = bytes(call("cuDeviceGetName", 128, handle)).partition(b"\0")[0].decode()
    version = (
        attribute(ordinal, "COMPUTE_CAPABILITY_MAJOR"),
        attribute(ordinal, "COMPUTE_CAPABILITY_MINOR"),
    )
    if version < _OLDEST:
        raise BackendError(
            f"device {ordinal} is a {name} of compute capability {version[0]}.{version[1]}, must "
            f'be at least {_OLDEST[0]}.{_OLDEST[1]}; use backend="host"'
        )
    return Device(
        ordinal,
        name,
        uuid(ordinal),
        arch_of(*version),
        attribute(ordinal, "MULTIPROCESSOR_COUNT"),
        int(call("cuDevicePrimaryCtxRetain", handle, note=f"on device {ordinal}")),
    )


def arch_of(major: int, minor: int) -> str:
    """What a GPU of this compute capability compiles for: all that it alone can, where there is."""
    return f"sm_{major}{minor}{'a' if (major, minor) >= _FIRST_SPECIFIC else ''}"


def uuid(ordinal: int) -> str:
    """What names a device in every process."""
    return bytes(call("cuDeviceGetUuid", call("cuDeviceGet", ordinal)).bytes).hex()


def pick_device(local_rank: int) -> Device:
    """The device that this thread has made current, else the one of this rank."""
    if int(call("cuCtxGetCurrent")) != 0:
        return device(int(call("cuCtxGetDevice")))
    count = num_devices()
    if count == 0:
        raise BackendError(f"there is no GPU (CUDA_VISIBLE_DEVICES?). {_CURE}")
    return device(local_rank % count)


def can_access(ordinal: int, other: int) -> bool:
    """Whether a device can read and write another's memory."""
    return ordinal == other or bool(call("cuDeviceCanAccessPeer", ordinal, other))


def device_of(address: int) -> int:
    """The number of the device whose memory an address is in.

    Raises:
        BackendError: It is in no device's memory.
    """
    # Why not cuda.bindings': 13.3.1 says 0 whatever the device.
    found = ctypes.c_int(-1)
    which = int(constant("CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"))
    code = _pointer_attribute()(ctypes.byref(found), which, address)
    if code != 0:
        raise DriverError(error_text("cuPointerGetAttribute", code, f"for {address:#x}"), code)
    return found.value


@lru_cache(maxsize=1)
def _pointer_attribute() -> Any:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return prototype(function_address("cuPointerGetAttribute"))


# ---- Streams and copies ----------------------------------------------------------------------


def make_stream() -> int:
    """A stream of the current device that waits for no other; it lives as long as the context."""
    return int(call("cuStreamCreate", _NON_BLOCKING))


def write(to: int, data: Any, stream: int) -> None:
    """Writes bytes to device memory, this rank's or a peer's, and waits until they are there.

    Args:
        to: Address.
        data: bytes, or whatever has a buffer of single bytes, as a NumPy array of uint8.
        stream: Does the copy.
    """
    call("cuMemcpyHtoDAsync", to, data, len(data), stream, note=f"of {len(data)} bytes")
    call("cuStreamSynchronize", stream)


def read(address: int, num_bytes: int, stream: int) -> bytes:
    """Bytes of device memory."""
    data = bytearray(num_bytes)
    read_into(data, address, stream)
    return bytes(data)


def read_into(data: Any, address: int, stream: int) -> None:
    """Fills a writable buffer of single bytes, as of a bytearray, from device memory."""
    call("cuMemcpyDtoHAsync", data, address, len(data), stream, note=f"of {len(data)} bytes")
    call("cuStreamSynchronize", stream)


def fill(address: int, byte: int, num_bytes: int, stream: int) -> None:
    """Writes one byte value over device memory."""
    call("cuMemsetD8Async", address, byte, num_bytes, stream)
    call("cuStreamSynchronize", stream)


def synchronize(where: Device) -> None:
    """Waits for everything that was launched on a device."""
    with where.current():
        call("cuCtxSynchronize")


def intervals_us(stream: int, parts: Sequence[Callable[[], None]]) -> list[float]:
    """Microseconds that a stream of the current device takes for what each part enqueues on it.

    The parts follow each other without a pause; waits for the end of the last one.
    """
    events: list[Any] = []
    try:
        for _ in range(len(parts) + 1):
            events.append(call("cuEventCreate", 0))
        call("cuEventRecord", events[0], stream)
        for part, event in zip(parts, events[1:], strict=True):
            part()
            call("cuEventRecord", event, stream)
        call("cuEventSynchronize", events[-1])
        return [float(call("cuEventElapsedTime", *pair)) * 1e3 for pair in pairwise(events)]
    finally:
        for event in events:
            attempt("cuEventDestroy", event)


# ---- Modules and launches --------------------------------------------------------------------


# What drain() asks: whoever releases memory.
drains: list[Callable[[], None]] = []


def drain() -> None:
    """Waits until memory that was dropped is released, for ten seconds at most.

    Before a stream is captured: a release waits for the device, which ends any capture there is.
    """
    for each in drains:
        each()


@contextmanager
def uncaptured() -> Iterator[None]:
    """Within, this thread may load code although a stream is being captured into a graph."""
    relaxed = constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED")
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Library:
    """Compiled kernels, which every device of their architecture can launch."""

    def __init__(self, code: bytes) -> None:
        self._handle = call("cuLibraryLoadData", code, [], [], 0, [], [], 0)

    def kernel(self, name: bytes) -> int:
        """A kernel by its name in the code."""
        return int(call("cuLibraryGetKernel", self._handle, name, note=f"for {name.decode()}"))


def parameters(kernel: int) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each parameter of a kernel."""
    found: list[tuple[int, int]] = []
    driver = _driver()
    while True:
        code, offset, num_bytes = driver.cuKernelGetParamInfo(kernel, len(found))
        if int(code) != 0:
            return tuple(found)
        found.append((int(offset), int(num_bytes)))


def function(kernel: int, shared_bytes: int = 0) -> int:
    """The kernel on the current device, loaded there, with so much dynamic shared memory."""
    handle = call("cuKernelGetFunction", kernel)
    if shared_bytes > 0:
        which = constant("CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")
        note = f"for {shared_bytes} bytes of shared memory"
        call("cuFuncSetAttribute", handle, which, shared_bytes, note=note)
    return int(handle)


def max_threads(handle: int) -> int:
    """The most threads that a block of a function may have, by the registers it uses."""
    which = constant("CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
    return int(call("cuFuncGetAttribute", which, handle))


def resident_blocks(handle: int, block: int, shared_bytes: int) -> int:
    """How many blocks of a function one multiprocessor runs side by side."""
    return int(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", handle, block, shared_bytes))


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
    """Enqueues a kernel on a stream of the current device; `arguments` are copied.

    `cooperative`: for kernels that use CUDA's cooperative groups; kccl's own need no such launch.
    """
    values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
    addresses = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
    note = f"with {grid} blocks of {block} threads, {shared_bytes} bytes of shared memory"
    shape = (grid, 1, 1, block, 1, 1, shared_bytes)
    where = ctypes.addressof(addresses)
    if cooperative:
        call("cuLaunchCooperativeKernel", handle, *shape, stream, where, note=note)
    else:
        call("cuLaunchKernel", handle, *shape, stream, where, 0, note=note)
