"""NVIDIA's driver and run-time compiler, through cuda.bindings: the one module that touches them.

Every function goes through call(), which turns an error code into a BackendError that names the
function and the code. Handles are integers everywhere else.
"""

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .errors import BackendError

LEGACY_STREAM = 1  # CU_STREAM_LEGACY, on every device
_CURE = "pip install 'kccl[cuda]', and NVIDIA's driver where the GPU is; or use backend=\"host\""
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PINNED_FLAGS = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
# What an oldest supported chip is, and from where on names of architectures end in "a".
_OLDEST, _FIRST_SPECIFIC = (8, 0), (9, 0)


class DriverError(BackendError):
    """A function of the driver or of NVRTC refused.

    Attributes:
        code: Its error code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


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


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"NVRTC cannot be loaded: {error}. pip install 'kccl[cuda]'") from error
    return nvrtc


def call(name: str, *args: Any, note: str = "") -> Any:
    """Calls a function of the driver (cu...) or of NVRTC (nvrtc...).

    Args:
        name: Of the function.
        *args: As cuda.bindings has them.
        note: What the error message adds: the argument that matters.

    Returns:
        None, its result, or a tuple of its results.

    Raises:
        BackendError: It failed, or is not there.
    """
    library = _nvrtc() if name.startswith("nvrtc") else _driver()
    code, *results = getattr(library, name)(*args)
    if int(code) != 0:
        raise DriverError(error_text(name, int(code), note), int(code))
    return results[0] if len(results) == 1 else tuple(results) or None


def error_text(name: str, code: int, note: str = "") -> str:
    """What is said when function `name` returned an error code."""
    library = _nvrtc() if name.startswith("nvrtc") else _driver()
    kind = library.nvrtcResult if name.startswith("nvrtc") else library.CUresult
    known = {int(each): each.name for each in kind}
    return f"{name} failed: {known.get(code, 'unknown error')} ({code}){note and ' ' + note}"


def function_address(name: str) -> int:
    """Where a function of the driver lies, for callers in C."""
    version = call("cuDriverGetVersion")
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
        num_sms: Multiprocessors.
        context: Address of the context.
    """

    ordinal: int
    name: str
    uuid: str
    arch: str
    num_sms: int
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
            f"be at least {_OLDEST[0]}.{_OLDEST[1]}; use backend=\"host\""
        )
    arch = f"sm_{version[0]}{version[1]}{'a' if version >= _FIRST_SPECIFIC else ''}"
    return Device(
        ordinal,
        name,
        bytes(call("cuDeviceGetUuid", handle).bytes).hex(),
        arch,
        attribute(ordinal, "MULTIPROCESSOR_COUNT"),
        int(call("cuDevicePrimaryCtxRetain", handle, note=f"on device {ordinal}")),
    )


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


# ---- Streams and copies ----------------------------------------------------------------------


def make_stream() -> int:
    """A stream of the current device that waits for no other; it lives as long as the context."""
    return int(call("cuStreamCreate", _NON_BLOCKING))


def write(to: int, data: bytes, stream: int) -> None:
    """Writes bytes to device memory, this rank's or a peer's, and waits until they are there."""
    call("cuMemcpyHtoDAsync", to, data, len(data), stream, note=f"of {len(data)} bytes")
    call("cuStreamSynchronize", stream)


def read(address: int, num_bytes: int, stream: int) -> bytes:
    """Bytes of device memory."""
    data = bytearray(num_bytes)
    call("cuMemcpyDtoHAsync", data, address, num_bytes, stream, note=f"of {num_bytes} bytes")
    call("cuStreamSynchronize", stream)
    return bytes(data)


def fill(address: int, byte: int, num_bytes: int, stream: int) -> None:
    """Writes one byte value over device memory."""
    call("cuMemsetD8Async", address, byte, num_bytes, stream)
    call("cuStreamSynchronize", stream)


def synchronize(where: Device) -> None:
    """Waits for everything that was launched on a device."""
    with where.current():
        call("cuCtxSynchronize")


# ---- Memory ----------------------------------------------------------------------------------


class Memory:
    """Plain memory of the current device, or pinned host memory that all devices map.

    Attributes:
        address: The same on host and devices.
        nbytes: Size in bytes; zero at first.
    """

    def __init__(self, where: Device, nbytes: int, *, on_host: bool = False) -> None:
        self.nbytes = nbytes
        with where.current():
            if on_host:
                self.address = int(call("cuMemHostAlloc", nbytes, _PINNED_FLAGS))
                ctypes.memset(self.address, 0, nbytes)
            else:
                self.address = int(call("cuMemAlloc", nbytes, note=f"of {nbytes} bytes"))
                call("cuMemsetD8", self.address, 0, nbytes)
                call("cuCtxSynchronize")
        name = "cuMemFreeHost" if on_host else "cuMemFree"
        _at_end(self, where, ((name, (self.address,)),))


class Shareable:
    """Device memory with a mapping of its own, which other devices and processes can map too.

    Attributes:
        address: Where this process maps it.
        nbytes: Size, rounded up to what the driver maps.
        device: The device whose memory it is; of what was imported, the one that maps it.
    """

    def __init__(self, where: Device, nbytes: int, fd: int | None = None) -> None:
        """Allocates; with `fd`, maps what another process exported there.

        Raises:
            BackendError: The driver refused.
        """
        self.device = where
        kind = _fd_kind()
        prop = constant("CUmemAllocationProp")()
        prop.type = constant("CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED")
        prop.location = _location(where.ordinal)
        prop.requestedHandleTypes = kind
        minimum = constant(
            "CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED"
        )
        unit = int(call("cuMemGetAllocationGranularity", prop, minimum))
        self.nbytes = -(-nbytes // unit) * unit
        note = f"on device {where.ordinal}, {self.nbytes} bytes"
        undo: list[tuple[str, tuple[Any, ...]]] = []
        try:
            with where.current():
                if fd is None:
                    self._handle = call("cuMemCreate", self.nbytes, prop, 0, note=note)
                else:
                    self._handle = call("cuMemImportFromShareableHandle", fd, kind, note=note)
                undo.insert(0, ("cuMemRelease", (self._handle,)))
                self.address = int(
                    call("cuMemAddressReserve", self.nbytes, unit, 0, 0, note=note)
                )
                undo.insert(0, ("cuMemAddressFree", (self.address, self.nbytes)))
                call("cuMemMap", self.address, self.nbytes, 0, self._handle, 0, note=note)
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
            each = constant("CUmemAccessDesc")()
            each.location = _location(ordinal)
            each.flags = constant("CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            access.append(each)
        note = f"for devices {ordinals} on device {self.device.ordinal}"
        call("cuMemSetAccess", self.address, self.nbytes, access, len(access), note=note)

    def export(self) -> int:
        """A descriptor by which another process can map it; the caller closes it."""
        return int(call("cuMemExportToShareableHandle", self._handle, _fd_kind(), 0))


def _fd_kind() -> Any:
    return constant("CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")


def _location(ordinal: int) -> Any:
    location = constant("CUmemLocation")()
    location.type = constant("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE")
    location.id = ordinal
    return location


def _at_end(owner: object, where: Device, calls: tuple[tuple[str, tuple[Any, ...]], ...]) -> None:
    """Makes the calls when `owner` is collected; the end of the process needs none."""
    weakref.finalize(owner, _undo, where, calls, os.getpid()).atexit = False


def _undo(where: Device, calls: tuple[tuple[str, tuple[Any, ...]], ...], pid: int) -> None:
    # Nobody hears of an error here; a forked child has no context.
    if os.getpid() != pid:
        return
    driver = _driver()
    driver.cuCtxPushCurrent(where.context)
    # What was launched may still use the memory.
    driver.cuCtxSynchronize()
    for name, args in calls:
        getattr(driver, name)(*args)
    driver.cuCtxPopCurrent()


# ---- Modules and launches --------------------------------------------------------------------


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
    found = []
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
    return int(
        call("cuOccupancyMaxActiveBlocksPerMultiprocessor", handle, block, shared_bytes)
    )


def launch(
    handle: int,
    arguments: Sequence[bytes],
    *,
    grid: int,
    block: int,
    shared_bytes: int,
    stream: int,
) -> None:
    """Enqueues a kernel on a stream of the current device; `arguments` are copied."""
    values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
    addresses = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
    note = f"with {grid} blocks of {block} threads, {shared_bytes} bytes of shared memory"
    shape = (grid, 1, 1, block, 1, 1, shared_bytes)
    where = ctypes.addressof(addresses)
    call("cuLaunchKernel", handle, *shape, stream, where, 0, note=note)
