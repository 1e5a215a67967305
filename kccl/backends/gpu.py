"""The cuda and hip backends: a rank drives one GPU; ranks are processes, or threads of one.

What differs between the vendors is in their tables, kccl/gpu/cuda.py and hip.py.

A call is one kernel, enqueued on the caller's stream. The kernel waits for peers on the GPU. If it
fails, the next call or comm.check() raises the error.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import topology
from ..base import abi, dtypes, env
from ..base.abi import ffi, lib
from ..base.arrays import ArrayView
from ..base.errors import BackendError, Error, InvalidArgument, Timeout
from ..gpu import arrays, driver, sharing, strided
from ..gpu.arrays import DeviceView
from ..gpu.graphs import KernelGraph
from ..gpu.library import library_kernel, occupancy, serve
from ..gpu.memory import GpuWindow
from ..gpu.state import DeviceState
from ..gpu.table import DriverError
from ..plan.limits import not_resident
from ..plan.specs import BY_NAME
from ..ranks.team import Connected
from ..ranks.windows import Window
from . import share
from .base import Backend
from .calls import fill_op
from .departure import depart, leave_when_collected
from .device_comm import DeviceComm
from .gpu_memory import GpuMemory
from .scratch import Scratches
from .settings import Settings
from .shapes import check_shape, longest_row
from .temporaries import Temporaries
from .watch import Watcher

# KcclGpuLaunch (how a call was launched) -> field of KcclGpuQueue: the function that refused it.
_LAUNCHED_BY = {
    lib.kKcclNoLaunch: "push_context",
    lib.kKcclLaunchKernel: "launch",
    lib.kKcclLaunchGraph: "launch_graph",
    lib.kKcclLaunchDependent: "launch_ex",
    lib.kKcclLaunchAnnounced: "set_params",
}


class GpuBackend(Backend):
    """One rank's memory and calls on a GPU.

    Attributes:
        device: The GPU.
    """

    can_attach = has_virtual_time = False
    has_streams = True
    copied = staticmethod(strided.copied)

    def __init__(
        self,
        device: driver.Device,
        mesh: Connected,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """See Opener; `device` is the rank's."""
        variables = env.read()
        self.name = driver.table().backend
        self.device = device
        self._pid = os.getpid()
        serve(device, mesh.world_size, variables.preload)
        # Ranks that share a GPU use no programmatic dependents: their waiting blocks would fill it.
        self._shares_gpu = are_threads and mesh.world_size > driver.num_devices()
        # Returns the current stream of the library whose array was used last, for calls without
        # arrays.
        self._stream_before: Callable[[], int] = driver.legacy_stream
        shared = sharing.agree(
            mesh, device, are_threads=are_threads, forced=variables.windows, timeout=timeout
        )
        self.caveat = shared.caveat
        self.longest_row = longest_row(settings.packet_bytes, mesh.world_size)
        self._share = share.agree(
            mesh, variables.streams, device.multiprocessors, self.longest_row, timeout
        )
        self.context = ffi.new("KcclHostContext *")
        self.context.shares_cores = shares_cores
        # Calls release the GIL, because a launch may have to wait until the stream has room.
        self.context.holds_gil = False
        self._memory = GpuMemory(mesh, device, are_threads=are_threads, way=shared.way)
        self.state = DeviceState(device, self.context, has_dependents=variables.dependents != 0)
        self._scratches = Scratches(
            mesh,
            settings,
            self._memory,
            state=self.state.address,
            polls_per_check=abi.GPU_POLLS_PER_CHECK,
            timeout=timeout,
            grid_counters=_grid_counters(variables.layout),
        )
        self._comm = self._scratches.comm
        self._temporaries = Temporaries(self._memory.plain)
        self._watcher = Watcher(mesh.pidfds, self._lose, mesh.end_event)
        leave_when_collected(self, device, self.state, self._scratches)

    def _lose(self, peer: int) -> None:
        """Notes that a peer's process has ended, in the mailbox that waiting kernels check."""
        self.state.mailbox.gone |= 1 << peer

    # ---- Memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout: float) -> Window:
        """See Backend."""
        return self._memory.window(nbytes, "window", timeout)

    def comm_for_kernels(
        self, channels: int, max_bytes: int, exchange_bytes: int, timeout: float
    ) -> DeviceComm:
        """See Backend."""
        return self._scratches.comm_for_kernels(channels, max_bytes, exchange_bytes, timeout)

    def temporary(self, nbytes: int, channel: int) -> int:
        """See Backend."""
        return self._temporaries.room(nbytes, channel)

    def view(self, array: Any, name: str, *, writable: bool) -> ArrayView:
        """See Backend."""
        found = arrays.view(array, name, writable=writable, device=self.device.ordinal)
        self._stream_before = found.stream
        # The type is for C, which makes later calls on arrays of this type without this method.
        self.state.queue.array_type = id(found.exchange_type) if found.exchange_type else 0
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

    def stream_of_prepared(self, given: Any, view: ArrayView | None) -> int | Callable[[], int]:
        """See Backend."""
        if given is not None:
            return arrays.stream_of(given)
        return view.stream if isinstance(view, DeviceView) else lambda: self._stream_before()

    def as_graph(self, handle: Any) -> KernelGraph | None:
        """See Backend."""
        if handle.kernel != ffi.addressof(lib, "kccl_gpu_run_op"):
            return None
        gpu_op = ffi.cast("KcclGpuOp *", handle)
        call = ffi.new("KcclCall *")
        lib.kccl_gpu_argument(gpu_op, call)
        graph = KernelGraph(
            self.device,
            gpu_op.function,
            bytes(ffi.buffer(call)),
            grid=gpu_op.num_blocks,
            block=gpu_op.threads_per_block,
        )
        gpu_op.graph = graph.handle
        return graph

    def intervals_us(self, stream: int, parts: Sequence[Callable[[], None]]) -> list[float]:
        """See Backend."""
        with self.device.current():
            return driver.intervals_us(stream, parts)

    # ---- Calls -------------------------------------------------------------------------------

    def call(
        self,
        kernel: str,
        shape: tuple[int, int] = (0, 0),
        *,
        dtype: str = "float32",
        op: str = "sum",
        **fields: int,
    ) -> Any:
        """See Backend."""
        entry = library_kernel(
            kernel, dtype=dtype, op=op, world_size=self._comm.world_size, arch=self.device.arch
        )
        gpu_op = ffi.new("KcclGpuOp *")
        fill_op(gpu_op.op, self._comm, kernel, dtype, op, **fields)
        gpu_op.op.call.comm.state = int(ffi.cast("uintptr_t", self.state.host))
        gpu_op.op.kernel = lib.kccl_gpu_run_op
        gpu_op.queue = self.state.queue
        with self.device.current():
            gpu_op.function = entry.function()
            most = driver.table().max_threads(gpu_op.function)
        gpu_op.stream = driver.legacy_stream()
        spec = BY_NAME[kernel]
        at_once = partial(occupancy, self.device, gpu_op.function)
        blocks, threads = gpu_op.num_blocks, gpu_op.threads_per_block = self._share.shape(
            spec, fields, dtype, most, shape, occupancy=at_once, warp_size=driver.table().warp_size
        )
        gpu_op.op.call.share = spec.share(fields.get("count", 0), dtype, blocks)
        if not self._shares_gpu:
            gpu_op.op.call.fit = self._share.fit(blocks, at_once(threads))
        # Returns the KcclHostOp, which keeps the KcclGpuOp around it alive.
        return ffi.gc(ffi.addressof(gpu_op, "op"), lambda _, owner=gpu_op: None)

    def check_shape(self, blocks: Any, threads: Any) -> None:
        """See Backend."""
        check_shape(blocks, threads, driver.table().warp_size)

    def shape_of(self, handle: Any) -> tuple[int, int]:
        """See Backend."""
        call = ffi.cast("KcclGpuOp *", handle)
        return int(call.num_blocks), int(call.threads_per_block)

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

    # ---- Failure, recovery, end --------------------------------------------------------------

    def failure(self) -> Error | None:
        """See Backend: a launch that the driver refused. It can be tried again."""
        error = self.state.queue.error
        if error == 0:
            return None
        self.state.queue.error = 0
        self.state.host.status = lib.kKcclOk
        note = f"({self.caveat})" if self.caveat and self.state.mailbox.gone else ""
        gpu = driver.table()
        name = {**gpu.queue, **gpu.dependents_queue}[_LAUNCHED_BY[self.state.queue.how]]
        return DriverError(gpu.error_text(name, error, note), error)

    def simulated_waits(self) -> str | None:
        """See Backend."""
        return None

    def abort(self) -> None:
        """See Backend."""
        if self.state.status != lib.kKcclOk:
            return
        record = ffi.new("KcclRecord *")
        record.status = lib.kKcclAborted
        record.rank = record.peer = self._comm.rank
        self.state.fail(record)
        depart(self._comm, self.state, lib.kKcclGaveUp, bytes(ffi.buffer(record)))

    def leave(self) -> None:
        """See Backend; waits for this rank's calls to end first, unless they have failed."""
        if os.getpid() != self._pid:
            return
        try:
            # Ignores an error of the device, after which nothing can be written to the peers.
            with contextlib.suppress(BackendError):
                if self.state.status == lib.kKcclOk:
                    self._wait_for_device("close()")
                if self.state.status == lib.kKcclOk:
                    depart(self._comm, self.state, lib.kKcclLeft)
        finally:
            self._watcher.stop()

    def drop_memory(self) -> None:
        """See Backend. Frees nothing: graphs of calls may still run, and find that the status is
        closed.
        """

    def wait_for_calls(self, what: str) -> None:
        """See Backend."""
        self._wait_for_device(what)

    def _wait_for_device(self, what: str) -> None:
        """Waits for all kernels of the device, because the driver cannot wait for this rank's."""
        limit_s = self.state.limit_ns / 1e9
        if not driver.synchronize_within(self.device, limit_s):
            rank = self._comm.rank
            raise Timeout(
                f"rank {rank}: the kernels on device {self.device.ordinal} did not end within "
                f"{limit_s:.3g} s; {what} waits for all of them (comm.timeout is the limit)",
                rank=rank,
                collective=what.removesuffix("()"),
                waited_s=limit_s,
            )

    def clear(self) -> None:
        """See Backend."""
        self._scratches.clear()
        self.state.clear()


def _grid_counters(layout: str) -> int | None:
    """Returns how many counters grid_sync uses, by the dies of the machine's GPUs; None: as many as
    the target has.

    Args:
        layout: KCCL_LAYOUT, as in Env.
    """
    if driver.table().backend != "hip":
        return None  # CUDA's kernels have one counter.
    return topology.grid_counters(topology.with_gpus(topology.discover()), layout)
