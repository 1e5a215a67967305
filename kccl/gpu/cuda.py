"""NVIDIA's driver, through cuda.bindings: the one module that knows its names."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from ..base import extras
from ..base.errors import BackendError
from ..jit.nvrtc import NVRTC
from .table import DriverError, Names, Table

# Compute capabilities: the oldest one that KCCL supports, and the first one that has a variant
# "sm_..a" and launches programmatic dependents.
_OLDEST, _HOPPER = (8, 0), (9, 0)
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Cuda(Table):
    """See Table. A context is the address of a device's primary context, which PyTorch and CuPy use
    too.
    """

    backend = "cuda"
    vendor = "NVIDIA"
    names = Names(
        driver_version="cuDriverGetVersion",
        num_devices="cuDeviceGetCount",
        current_ordinal="cuCtxGetDevice",
        can_access="cuDeviceCanAccessPeer",
        enable_access="cuCtxEnablePeerAccess",
        synchronize_device="cuCtxSynchronize",
        create_stream="cuStreamCreate",
        synchronize_stream="cuStreamSynchronize",
        query_stream="cuStreamQuery",
        destroy_stream="cuStreamDestroy",
        copy_on_device="cuMemcpyDtoDAsync",
        begin_capture="cuStreamBeginCapture",
        end_capture="cuStreamEndCapture",
        launch_graph="cuGraphLaunch",
        copy_to_device="cuMemcpyHtoDAsync",
        copy_to_host="cuMemcpyDtoHAsync",
        fill="cuMemsetD8Async",
        create_event="cuEventCreate",
        record_event="cuEventRecord",
        synchronize_event="cuEventSynchronize",
        elapsed_ms="cuEventElapsedTime",
        query_event="cuEventQuery",
        destroy_event="cuEventDestroy",
        resident_blocks="cuOccupancyMaxActiveBlocksPerMultiprocessor",
        launch="cuLaunchKernel",
        launch_cooperative="cuLaunchCooperativeKernel",
        create_graph="cuGraphCreate",
        add_kernel_node="cuGraphAddKernelNode",
        instantiate_graph="cuGraphInstantiate",
        destroy_graph="cuGraphDestroy",
        destroy_instance="cuGraphExecDestroy",
        free="cuMemFree",
        allocate_on_host="cuMemHostAlloc",
        free_on_host="cuMemFreeHost",
        close_handle="cuIpcCloseMemHandle",
        create_memory="cuMemCreate",
        release_memory="cuMemRelease",
        reserve_addresses="cuMemAddressReserve",
        free_addresses="cuMemAddressFree",
        map_memory="cuMemMap",
        unmap_memory="cuMemUnmap",
    )
    errors = "CUresult"
    out_of_memory = 2  # CUDA_ERROR_OUT_OF_MEMORY
    not_ready = 600  # CUDA_ERROR_NOT_READY
    is_accessible = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    stream_flags = 1  # CU_STREAM_NON_BLOCKING
    capture_mode = "CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"
    legacy_stream = 1  # CU_STREAM_LEGACY
    host_flags = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
    multiprocessors = "MULTIPROCESSOR_COUNT"
    bus_parts = ("PCI_DOMAIN_ID", "PCI_BUS_ID", "PCI_DEVICE_ID")
    shared_bytes = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
    maps_memory = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    exports_memory = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    warp_size = 32
    dlpack_type = 2  # kDLCUDA
    queue: ClassVar[Mapping[str, str]] = {
        "launch": "cuLaunchKernel",
        "launch_graph": "cuGraphLaunch",
        "is_capturing": "cuStreamIsCapturing",
        "push_context": "cuCtxPushCurrent",
        "pop_context": "cuCtxPopCurrent",
    }
    dependents_queue: ClassVar[Mapping[str, str]] = {
        "launch_ex": "cuLaunchKernelEx",
        "capture_info": "cuStreamGetCaptureInfo",
        "node_type": "cuGraphNodeGetType",
        "get_params": "cuGraphKernelNodeGetParams",
        "set_params": "cuGraphKernelNodeSetParams",
        "function_name": "cuFuncGetName",
    }
    # From CUDA 12.3 on these functions tell which edges of a graph are programmatic.
    dependents_version = 12030
    dependents_capability = _HOPPER
    visible_devices = "CUDA_VISIBLE_DEVICES"
    handles = "CUDA IPC"
    paths = "NVLink or peer-to-peer PCIe"
    needs = "cuda-bindings, NVRTC and NVIDIA's driver"
    compiler = NVRTC

    @property
    def cure(self) -> str:
        install = extras.install("cuda")
        return f'{install}, and NVIDIA\'s driver where the GPU is; or use backend="host"'

    def load(self) -> Any:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BackendError(f"cuda.bindings cannot be imported: {error}. {self.cure}") from error
        try:
            (code,) = driver.cuInit(0)
        except RuntimeError as error:
            raise BackendError(f"NVIDIA's driver cannot be loaded: {error}. {self.cure}") from error
        if int(code) != 0:
            raise DriverError(f"cuInit failed: {code.name} ({int(code)}). {self.cure}", int(code))
        return driver

    def function_address(self, name: str, version: int = 0) -> int:
        version = version or self.call("cuDriverGetVersion")
        address, _ = self.call("cuGetProcAddress", name.encode(), version, 0)
        return int(address)

    # ---- Devices -----------------------------------------------------------------------------

    def attribute(self, ordinal: int, name: str) -> int:
        """See Table. `name` is the part behind CU_DEVICE_ATTRIBUTE_."""
        which = self.constant(f"CUdevice_attribute.CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", which, ordinal))

    def device_name(self, ordinal: int) -> str:
        device = self.call("cuDeviceGet", ordinal, note=f"for device {ordinal}")
        return bytes(self.call("cuDeviceGetName", 128, device)).partition(b"\0")[0].decode()

    def device_uuid(self, ordinal: int) -> str:
        return bytes(self.call("cuDeviceGetUuid", self.call("cuDeviceGet", ordinal)).bytes).hex()

    def device_arch(self, ordinal: int) -> str:
        version = self._compute_capability(ordinal)
        if version < _OLDEST:
            raise BackendError(
                f"device {ordinal} is a {self.device_name(ordinal)} of compute capability "
                f"{version[0]}.{version[1]}, must be at least {_OLDEST[0]}.{_OLDEST[1]}; "
                'use backend="host"'
            )
        return self._arch_of(*version)

    def arch_for(self, arch: str) -> str:
        """See Table. From sm_90 on adds an "a", for features that only this capability has."""
        match = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
        return arch if match is None else self._arch_of(int(match[1]), int(match[2]))

    @staticmethod
    def _arch_of(major: int, minor: int) -> str:
        return f"sm_{major}{minor}{'a' if (major, minor) >= _HOPPER else ''}"

    def _compute_capability(self, ordinal: int) -> tuple[int, int]:
        return (
            self.attribute(ordinal, "COMPUTE_CAPABILITY_MAJOR"),
            self.attribute(ordinal, "COMPUTE_CAPABILITY_MINOR"),
        )

    def open_device(self, ordinal: int) -> int:
        device = self.call("cuDeviceGet", ordinal)
        return int(self.call("cuDevicePrimaryCtxRetain", device, note=f"on device {ordinal}"))

    def push(self, context: int) -> None:
        self.call("cuCtxPushCurrent", context)

    def pop(self) -> None:
        self.call("cuCtxPopCurrent")

    def has_current(self) -> bool:
        return int(self.call("cuCtxGetCurrent")) != 0

    def device_of(self, address: int) -> int:
        found = ctypes.c_int(-1)
        code = self._pointer_attribute(ctypes.byref(found), self._device_ordinal, address)
        if code != 0:
            note = f"for {address:#x}"
            raise DriverError(self.error_text("cuPointerGetAttribute", code, note), code)
        return found.value

    # cuda.bindings' own function is not used, because that of 13.3.1 returns 0 whatever the device.
    @cached_property
    def _pointer_attribute(self) -> Any:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        return prototype(self.function_address("cuPointerGetAttribute"))

    @cached_property
    def _device_ordinal(self) -> int:
        return int(self.constant("CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"))

    # ---- Kernels -----------------------------------------------------------------------------

    def load_code(
        self, code: bytes, names: Sequence[str]
    ) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """See Table. The code is loaded as a module, which belongs to one context. With
        CUDA_MODULE_LOADING=EAGER, a library would be loaded into all contexts, and wait for their
        kernels.
        """
        module = self.call("cuModuleLoadData", code)
        found = []
        for name in names:
            note = f"for {name}"
            function = self.call("cuModuleGetFunction", module, name.encode(), note=note)
            # Loads the kernel now. By default the driver would load it at its first use.
            self.call("cuFuncLoad", function, note=note)
            found.append((int(function), self._parameters(int(function))))
        return found

    def _parameters(self, function: int) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        while True:
            code, offset, num_bytes = self.binding.cuFuncGetParamInfo(function, len(found))
            if int(code) == int(self.constant("CUresult.CUDA_ERROR_INVALID_VALUE")):
                return tuple(found)
            if int(code) != 0:
                raise DriverError(self.error_text("cuFuncGetParamInfo", int(code)), int(code))
            found.append((int(offset), int(num_bytes)))

    def allow_shared_bytes(self, function: int, num_bytes: int) -> None:
        which = self.constant(
            "CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        )
        note = f"for {num_bytes} bytes of shared memory"
        self.call("cuFuncSetAttribute", function, which, num_bytes, note=note)

    def function_attribute(self, function: int, name: str) -> int:
        which = self.constant(f"CUfunction_attribute.CU_FUNC_ATTRIBUTE_{name}")
        return int(self.call("cuFuncGetAttribute", which, function))

    def kernel_node(self, function: int, *, grid: int, block: int, arguments: int) -> Any:
        node = self.constant("CUDA_KERNEL_NODE_PARAMS")()
        node.func = function
        node.gridDimX, node.gridDimY, node.gridDimZ = grid, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = block, 1, 1
        node.kernelParams = arguments
        return node

    def launches_dependents(self, ordinal: int) -> bool:
        if self.call("cuDriverGetVersion") < self.dependents_version:
            return False
        return self._compute_capability(ordinal) >= self.dependents_capability

    def relax_captures(self) -> Any:
        relaxed = self.constant("CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED")
        return self.call("cuThreadExchangeStreamCaptureMode", relaxed)

    def restore_captures(self, before: Any) -> None:
        self.call("cuThreadExchangeStreamCaptureMode", before)

    # ---- Memory of the current device --------------------------------------------------------

    def allocate(self, num_bytes: int, note: str) -> int:
        return int(self.call("cuMemAlloc", num_bytes, note=note))

    def export_handle(self, address: int) -> bytes:
        return bytes(self.call("cuIpcGetMemHandle", address).reserved)

    def open_handle(self, handle: bytes, note: str) -> int:
        made = self.constant("CUipcMemHandle")()
        made.reserved = handle
        return int(self.call("cuIpcOpenMemHandle", made, _LAZY_PEER_ACCESS, note=note))

    def memory_kind(self, ordinal: int) -> Any:
        kind = self.constant("CUmemAllocationProp")()
        kind.type = self.constant("CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED")
        kind.location = self._location(ordinal)
        kind.requestedHandleTypes = self._fd_kind()
        return kind

    def memory_unit(self, kind: Any) -> int:
        best = "CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED"
        return int(self.call("cuMemGetAllocationGranularity", kind, self.constant(best)))

    def allow_access(
        self, address: int, num_bytes: int, ordinals: Sequence[int], note: str
    ) -> None:
        access = []
        for ordinal in ordinals:
            each = self.constant("CUmemAccessDesc")()
            each.location = self._location(ordinal)
            each.flags = self.constant("CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            access.append(each)
        self.call("cuMemSetAccess", address, num_bytes, access, len(access), note=note)

    def export_memory(self, memory: Any) -> int:
        return int(self.call("cuMemExportToShareableHandle", memory, self._fd_kind(), 0))

    def import_memory(self, fd: int, note: str) -> Any:
        return self.call("cuMemImportFromShareableHandle", fd, self._fd_kind(), note=note)

    def _fd_kind(self) -> Any:
        return self.constant("CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")

    def _location(self, ordinal: int) -> Any:
        location = self.constant("CUmemLocation")()
        location.type = self.constant("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE")
        location.id = ordinal
        return location


CUDA = Cuda()
