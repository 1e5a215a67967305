"""What the backends of ranks that drive a GPU share: their arrays, streams and users' kernels."""

from collections.abc import Callable, Sequence
from typing import Any

from ..base import dtypes
from ..base.abi import ffi
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from ..gpu import arrays, driver, strided
from ..gpu.arrays import DeviceView
from ..gpu.memory import GpuWindow, Memory
from ..plan.limits import not_resident
from ..ranks.windows import Window
from .base import Backend


class OnGpu(Backend):
    """The part of a backend that concerns the rank's own GPU, and no other rank.

    Attributes:
        device: The GPU.
        queue: The KcclGpuQueue by which the rank enqueues calls.
    """

    can_attach = has_virtual_time = False
    has_streams = True
    copied = staticmethod(strided.copied)
    queue: Any

    def __init__(self, device: driver.Device) -> None:
        self.name = driver.table().backend
        self.device = device
        # Returns the current stream of the library whose array was used last, for calls without
        # arrays.
        self._stream_before: Callable[[], int] = driver.legacy_stream

    # ---- Arrays ------------------------------------------------------------------------------

    def answers(self, nbytes: int) -> tuple[int, Any]:
        """See Backend: pinned memory of the host."""
        with driver.uncaptured():
            memory = Memory(self.device, nbytes, None, on_host=True)
        return memory.address, memory

    def view(self, array: Any, name: str, *, writable: bool) -> ArrayView:
        """See Backend."""
        found = arrays.view(array, name, writable=writable, device=self.device.ordinal)
        self._stream_before = found.stream
        # The type is for C, which makes later calls on arrays of this type without this method.
        self.queue.array_type = id(found.exchange_type) if found.exchange_type else 0
        return found

    def array(self, window: Window, shape: tuple[int, ...], dtype: Any) -> Any:
        """See Backend."""
        assert isinstance(window, GpuWindow)
        return window.array(shape, dtypes.of(dtype))

    def like(self, array: Any, view: ArrayView, shape: tuple[int, ...]) -> Any:
        """See Backend."""
        return arrays.like(array, shape)

    # ---- Streams -----------------------------------------------------------------------------

    def stream(self, given: Any, view: ArrayView | None, others: Sequence[ArrayView] = ()) -> int:
        """See Backend."""
        if given is None and not isinstance(view, DeviceView):
            return self._stream_before()
        return arrays.stream_of_call(given, view, others)

    def set_stream(self, handle: Any, stream: int) -> None:
        """See Backend."""
        ffi.cast("KcclGpuOp *", handle).stream = stream

    def is_captured(self, stream: int) -> bool:
        """See Backend."""
        status = ffi.new("int *")
        ask = ffi.cast("int (*)(uint64_t, int *)", self.queue.is_capturing)
        # If the driver fails to say, the launch reports the error.
        with self.device.current():
            return bool(ask(stream, status) == 0 and status[0] != 0)

    def stream_of_prepared(self, given: Any, view: ArrayView | None) -> int | Callable[[], int]:
        """See Backend."""
        if given is not None:
            return arrays.stream_of(given)
        return view.stream if isinstance(view, DeviceView) else lambda: self._stream_before()

    def intervals_us(self, stream: int, parts: Sequence[Callable[[], None]]) -> list[float]:
        """See Backend."""
        with self.device.current():
            return driver.intervals_us(stream, parts)

    # ---- Users' kernels ----------------------------------------------------------------------

    def load(self, kernel: Any) -> None:
        """See Backend."""
        if kernel.module.arch != self.device.arch:
            raise InvalidArgument(
                f"{kernel.name} was compiled for {kernel.module.arch}, must be for the "
                f"communicator's device, {self.device.arch}"
            )
        with self.device.current():
            kernel.entry.function()

    def launch(
        self,
        kernel: Any,
        data: bytes,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        stream: int,
        arrays: Sequence[tuple[int, int, int, Any]] = (),
    ) -> None:
        """See Backend."""
        offsets = kernel.entry.offsets
        with self.device.current():
            kernel.entry.needs().check_launch(
                kernel.name, block, shared_bytes, self.device.shared_bytes, self.device.arch
            )
            handle = kernel.entry.function(shared_bytes)
            if any(size == ffi.sizeof("KcclDeviceComm") for _, size in offsets):
                self._check_resident(kernel.name, handle, grid, block, shared_bytes)
            values = [data[offset : offset + size] for offset, size in offsets]
            driver.launch(
                handle, values, grid=grid, block=block, shared_bytes=shared_bytes, stream=stream
            )

    def _check_resident(
        self, name: str, handle: int, grid: int, block: int, shared_bytes: int
    ) -> None:
        """Refuses a grid whose blocks, which may wait for each other, cannot all run at once."""
        room = driver.resident_blocks(handle, block, shared_bytes) * self.device.multiprocessors
        if grid > room:
            raise not_resident(grid, room, name, block)
