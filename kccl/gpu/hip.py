"""AMD's driver, through hip-python: the one module that knows its names.

Nothing here has run on an AMD GPU. tests/hip runs it on a runtime of the tests' own.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ..base import extras
from ..base.errors import BackendError, InvalidArgument
from ..jit.hiprtc import HIPRTC, binding_of, check_arch, said
from . import code_object
from .table import DriverError, Names, Table

_UNCACHED = 3  # hipDeviceMallocUncached, which hip-python does not have
_LAZY_PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess
# The first driver version, that of ROCm 7.1, in which hipMemImportFromShareableHandle takes the
# descriptor itself. Older ones take its address.
_IMPORTS_BY_VALUE = 70_100_000
# The types of memory of a device, as hip-python's hipPointerGetAttributes() names them.
_ON_DEVICE = ("hipMemoryTypeDevice", "hipMemoryTypeManaged")


class Hip(Table):
    """See Table. A context is a device's number, because HIP has no contexts."""

    backend = "hip"
    vendor = "AMD"
    names = Names(
        driver_version="hipDriverGetVersion",
        num_devices="hipGetDeviceCount",
        current_ordinal="hipGetDevice",
        can_access="hipDeviceCanAccessPeer",
        enable_access="hipDeviceEnablePeerAccess",
        synchronize_device="hipDeviceSynchronize",
        create_stream="hipStreamCreateWithFlags",
        synchronize_stream="hipStreamSynchronize",
        query_stream="hipStreamQuery",
        destroy_stream="hipStreamDestroy",
        copy_on_device="hipMemcpyDtoDAsync",
        begin_capture="hipStreamBeginCapture",
        end_capture="hipStreamEndCapture",
        launch_graph="hipGraphLaunch",
        copy_to_device="hipMemcpyHtoDAsync",
        copy_to_host="hipMemcpyDtoHAsync",
        fill="hipMemsetD8Async",
        create_event="hipEventCreateWithFlags",
        record_event="hipEventRecord",
        synchronize_event="hipEventSynchronize",
        elapsed_ms="hipEventElapsedTime",
        query_event="hipEventQuery",
        destroy_event="hipEventDestroy",
        resident_blocks="hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
        launch="hipModuleLaunchKernel",
        # KCCL makes no cooperative launches on AMD's GPUs: they are slow, and co-residency is
        # checked by occupancy.
        launch_cooperative="",
        create_graph="hipGraphCreate",
        add_kernel_node="hipGraphAddKernelNode",
        instantiate_graph="hipGraphInstantiateWithFlags",
        destroy_graph="hipGraphDestroy",
        destroy_instance="hipGraphExecDestroy",
        free="hipFree",
        allocate_on_host="hipHostMalloc",
        free_on_host="hipHostFree",
        close_handle="hipIpcCloseMemHandle",
        create_memory="hipMemCreate",
        release_memory="hipMemRelease",
        reserve_addresses="hipMemAddressReserve",
        free_addresses="hipMemAddressFree",
        map_memory="hipMemMap",
        unmap_memory="hipMemUnmap",
    )
    errors = "hipError_t"
    out_of_memory = 2  # hipErrorOutOfMemory
    not_ready = 600  # hipErrorNotReady
    is_accessible = 704  # hipErrorPeerAccessAlreadyEnabled
    stream_flags = 1  # hipStreamNonBlocking
    capture_mode = "hipStreamCaptureMode.hipStreamCaptureModeThreadLocal"
    # DLPack and the array API standard use this number too, and support neither 1 nor 2 on ROCm.
    legacy_stream = 0
    # hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent
    host_flags = 1 | 2 | 0x40000000
    multiprocessors = "MultiprocessorCount"
    bus_parts = ("PciDomainId", "PciBusId", "PciDeviceId")
    shared_bytes = "MaxSharedMemoryPerBlock"
    maps_memory = "VirtualMemoryManagementSupported"
    # HIP has no attribute for exports, so sharing.py tries one.
    exports_memory = "VirtualMemoryManagementSupported"
    warp_size = 64
    dlpack_type = 10  # kDLROCM
    queue: ClassVar[Mapping[str, str]] = {
        "launch": "hipModuleLaunchKernel",
        "launch_graph": "hipGraphLaunch",
        "is_capturing": "hipStreamIsCapturing",
        "push_context": "hipSetDevice",
        "current_device": "hipGetDevice",
    }
    # AMD's GPUs have no programmatic dependents.
    dependents_queue: ClassVar[Mapping[str, str]] = {}
    dependents_version = 0
    visible_devices = "HIP_VISIBLE_DEVICES"
    handles = "HIP IPC"
    paths = "Infinity Fabric or peer-to-peer PCIe"
    needs = "hip-python, and ROCm with hipRTC and AMD's driver"
    compiler = HIPRTC

    def __init__(self) -> None:
        # For each thread, the devices that were current before each push(), for pop().
        self._pushed = threading.local()

    @property
    def cure(self) -> str:
        return f'{extras.install("amd")}, and ROCm where the GPU is; or use backend="host"'

    def load(self) -> Any:
        try:
            hip = binding_of("hip")
        except ImportError as error:
            raise BackendError(f"hip-python cannot be imported: {error}. {self.cure}") from error
        try:
            (code,) = hip.hipInit(0)
        except RuntimeError as error:
            raise BackendError(
                f"AMD's driver cannot be loaded: {said(error)}. {self.cure}"
            ) from error
        if int(code) != 0:
            raise DriverError(f"hipInit failed: {code.name} ({int(code)}). {self.cure}", int(code))
        return hip

    def function_address(self, name: str, version: int = 0) -> int:
        version = version or self.call(self.names.driver_version)
        try:
            found, _ = self.call("hipGetProcAddress", name.encode(), version, 0, note=f"for {name}")
        except ValueError as error:
            # If the driver fails, hip-python reads a result that the driver has not written.
            raise BackendError(f"hipGetProcAddress failed for {name}: {error}") from error
        return int(found)

    # ---- Devices -----------------------------------------------------------------------------

    def attribute(self, ordinal: int, name: str) -> int:
        """See Table. `name` is the part behind hipDeviceAttribute."""
        which = self.constant(f"hipDeviceAttribute_t.hipDeviceAttribute{name}")
        return int(self.call("hipDeviceGetAttribute", which, ordinal))

    def device_name(self, ordinal: int) -> str:
        return str(self.call("hipDeviceGetName", 128, ordinal, note=f"for device {ordinal}"))

    def device_uuid(self, ordinal: int) -> str:
        return bytes(self.call("hipDeviceGetUuid", ordinal).bytes).hex()

    def device_arch(self, ordinal: int) -> str:
        # Cuts off the features behind the name, as in "gfx942:sramecc+:xnack-".
        full = str(self.call("hipGetDeviceProperties", ordinal).gcnArchName)
        arch = full.partition(":")[0]
        try:
            check_arch(arch)
        except InvalidArgument as error:
            raise BackendError(
                f'device {ordinal} is a {self.device_name(ordinal)}: {error}; use backend="host"'
            ) from None
        return arch

    def arch_for(self, arch: str) -> str:
        return arch

    def open_device(self, ordinal: int) -> int:
        return ordinal

    def push(self, context: int) -> None:
        before = int(self.call("hipGetDevice"))
        self.call("hipSetDevice", context, note=f"for device {context}")
        vars(self._pushed).setdefault("devices", []).append(before)

    def pop(self) -> None:
        self.call("hipSetDevice", self._pushed.devices.pop())

    def has_current(self) -> bool:
        """See Table. A thread's device is 0 until it sets another, so device 0 counts as none."""
        return int(self.call("hipGetDevice")) != 0

    def device_of(self, address: int) -> int:
        note = f"for {address:#x}"
        found = self.call("hipPointerGetAttributes", address, note=note)
        if found.type not in [self.constant(f"hipMemoryType.{name}") for name in _ON_DEVICE]:
            code = int(self.constant("hipError_t.hipErrorInvalidValue"))
            raise DriverError(f"hipPointerGetAttributes knows no memory of a device {note}", code)
        return int(found.device)

    # ---- Kernels -----------------------------------------------------------------------------

    def load_code(
        self, code: bytes, names: Sequence[str]
    ) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        parameters = code_object.parameters(code)
        for name in names:
            if name not in parameters:
                raise BackendError(f"the compiled code has no kernel {name}")
        module = self.call("hipModuleLoadData", code)
        found = []
        for name in names:
            note = f"for {name}"
            function = self.call("hipModuleGetFunction", module, name.encode(), note=note)
            found.append((int(function), parameters[name]))
        return found

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        """See Table. AMD's driver needs no permission, so this only checks that a block can have
        `num_bytes`.
        """
        if not self.call(self.names.resident_blocks, function, self.warp_size, num_bytes):
            code = int(self.constant("hipError_t.hipErrorInvalidValue"))
            raise DriverError(f"no device has {num_bytes} bytes of shared memory for a block", code)

    def function_attribute(self, function: int, name: str) -> int:
        which = self.constant(f"hipFunction_attribute.HIP_FUNC_ATTRIBUTE_{name}")
        return int(self.call("hipFuncGetAttribute", which, function))

    def kernel_node(self, function: int, *, grid: int, block: int, arguments: int) -> Any:
        node = self.constant("hipKernelNodeParams")()
        node.func = function
        node.gridDim.x, node.gridDim.y, node.gridDim.z = grid, 1, 1
        node.blockDim.x, node.blockDim.y, node.blockDim.z = block, 1, 1
        node.kernelParams = arguments
        return node

    def launches_dependents(self, ordinal: int) -> bool:
        return False

    def relax_captures(self) -> Any:
        return self._exchange_mode(
            self.constant("hipStreamCaptureMode.hipStreamCaptureModeRelaxed")
        )

    def restore_captures(self, before: Any) -> None:
        self._exchange_mode(before)

    def _exchange_mode(self, wanted: Any) -> int:
        mode = ctypes.c_int(int(wanted))
        code = self._exchange_capture_mode(ctypes.byref(mode))
        if code != 0:
            raise DriverError(self.error_text("hipThreadExchangeStreamCaptureMode", code), code)
        return mode.value

    # hip-python's own function is not used: it has no argument, although the driver reads the mode.
    @cached_property
    def _exchange_capture_mode(self) -> Any:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        return prototype(self.function_address("hipThreadExchangeStreamCaptureMode"))

    # ---- Memory of the current device --------------------------------------------------------

    def allocate(self, num_bytes: int, note: str) -> int:
        """See Table. It is uncached, so that no cache line in an L2 hides what a peer writes."""
        found = self.call("hipExtMallocWithFlags", num_bytes, _UNCACHED, note=note)
        return int(found)

    def export_handle(self, address: int) -> bytes:
        return bytes(self.call("hipIpcGetMemHandle", address).reserved)

    def open_handle(self, handle: bytes, note: str) -> int:
        made = self.constant("hipIpcMemHandle_t")()
        ctypes.memmove(int(made), handle, len(handle))
        return int(self.call("hipIpcOpenMemHandle", made, _LAZY_PEER_ACCESS, note=note))

    def memory_kind(self, ordinal: int) -> Any:
        kind = self.constant("hipMemAllocationProp")()
        uncached = "hipMemAllocationTypeUncached"
        try:
            kind.type = self.constant(f"hipMemAllocationType.{uncached}")
        except AttributeError:
            raise BackendError(f"this hip-python has no {uncached}") from None
        # Writes the second field, requestedHandleTypes, which hip-python does not have.
        ctypes.c_int.from_address(int(kind) + ctypes.sizeof(ctypes.c_int)).value = self._fd_kind()
        self._locate(kind.location, ordinal)
        return kind

    def memory_unit(self, kind: Any) -> int:
        best = "hipMemAllocationGranularity_flags.hipMemAllocationGranularityRecommended"
        return int(self.call("hipMemGetAllocationGranularity", kind, self.constant(best)))

    def allow_access(
        self, address: int, num_bytes: int, ordinals: Sequence[int], note: str
    ) -> None:
        # Descriptions are passed one at a time, because hip-python takes one description, not an
        # array.
        for ordinal in ordinals:
            each = self.constant("hipMemAccessDesc")()
            self._locate(each.location, ordinal)
            each.flags = self.constant("hipMemAccessFlags.hipMemAccessFlagsProtReadWrite")
            self.call("hipMemSetAccess", address, num_bytes, each, 1, note=note)

    def export_memory(self, memory: Any) -> int:
        """See Table. Raises BackendError if the driver's version cannot import the memory. Then
        windows use IPC handles.
        """
        version = int(self.call(self.names.driver_version))
        if version < _IMPORTS_BY_VALUE:
            raise BackendError(
                f"AMD's driver has version {version}, and imports memory by file descriptors from "
                f"{_IMPORTS_BY_VALUE} (ROCm 7.1) on"
            )
        fd = ctypes.c_int(-1)
        where = ctypes.addressof(fd)
        self.call("hipMemExportToShareableHandle", where, memory, self._fd_kind(), 0)
        return fd.value

    def import_memory(self, fd: int, note: str) -> Any:
        return self.call("hipMemImportFromShareableHandle", fd, self._fd_kind(), note=note)

    def _fd_kind(self) -> Any:
        return self.constant("hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor")

    def _locate(self, location: Any, ordinal: int) -> None:
        location.type = self.constant("hipMemLocationType.hipMemLocationTypeDevice")
        location.id = ordinal


HIP = Hip()
