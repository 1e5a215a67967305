"""Runs kernels that need no peer, without a communicator: on the host, or on an array's GPU."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..base import arrays
from ..base.abi import ABI_VERSION, ffi, lib
from ..base.arrays import ArrayView
from ..gpu import arrays as gpu_arrays
from ..gpu import driver
from ..gpu.library import library_kernel
from ..plan.specs import BY_NAME
from . import no_streams
from .calls import fill_call
from .shapes import launch_shape

_OF_HOST = 1  # DLPack's number for host memory


def place_of(array: Any) -> "OnHost | OnGpu":
    """Returns the object that runs kernels on an array: OnGpu for an array on a GPU, else OnHost.

    Raises:
        BackendError: The array is on a GPU that cannot be used.
    """
    is_cuda = getattr(array, "is_cuda", None)
    if is_cuda is None:
        found = getattr(array, "__dlpack_device__", None)
        is_cuda = found is not None and found()[0] != _OF_HOST
    return OnGpu(int(array.__dlpack_device__()[1])) if is_cuda else OnHost()


class OnHost:
    """Runs kernels in the calling thread."""

    view = staticmethod(arrays.view)
    stream = staticmethod(no_streams.stream)

    def run(self, kernel: str, dtype: str, stream: int, **fields: Any) -> None:
        """Runs a kernel to its end.

        Args:
            kernel: Its name.
            dtype: Name of the element type.
            stream: What stream() returned.
            fields: KcclCall's other fields.
        """
        handle = ffi.new("KcclHostOp *")
        state = ffi.new("KcclState *")
        fill_call(handle.call, _no_ranks(), kernel, dtype, **fields)
        handle.call.comm.state = int(ffi.cast("uintptr_t", state))
        if lib.kccl_host_bind(handle) != 0:
            raise AssertionError(f"no kernel {kernel} for {dtype}")
        lib.kccl_host_run(handle)


class OnGpu:
    """Enqueues kernels on a stream of a GPU."""

    def __init__(self, ordinal: int) -> None:
        """`ordinal` is the GPU's number in this process."""
        self._ordinal = ordinal
        self._device = driver.device(ordinal)

    def view(self, array: Any, name: str, *, writable: bool) -> ArrayView:
        """See Backend."""
        return gpu_arrays.view(array, name, writable=writable, device=self._ordinal)

    def stream(self, given: Any, view: ArrayView, others: Sequence[ArrayView] = ()) -> int:
        """See Backend."""
        return gpu_arrays.stream_of_call(given, view, others)

    def run(self, kernel: str, dtype: str, stream: int, **fields: Any) -> None:
        """Enqueues a kernel. Arguments as OnHost.run()."""
        call = ffi.new("KcclCall *")
        fill_call(call, _no_ranks(), kernel, dtype, **fields)
        with self._device.current():
            function, most = _function(kernel, dtype, self._device)
            grid, block = launch_shape(
                BY_NAME[kernel],
                fields["count"],
                dtype,
                most,
                width=fields["width"],
                warp_size=driver.table().warp_size,
            )
            driver.launch(
                function,
                [bytes(ffi.buffer(call))],
                grid=grid,
                block=block,
                shared_bytes=0,
                stream=stream,
            )


@lru_cache(maxsize=64)
def _function(kernel: str, dtype: str, device: driver.Device) -> tuple[int, int]:
    """Returns a kernel's function on the current device, and the most threads of a block."""
    entry = library_kernel(kernel, dtype=dtype, op="sum", world_size=1, arch=device.arch)
    function = entry.function()
    return function, driver.table().max_threads(function)


def _no_ranks() -> Any:
    """Returns a KcclDeviceComm without ranks, for kernels that need no peer."""
    comm = ffi.new("KcclDeviceComm *")
    comm.abi_version = ABI_VERSION
    return comm
