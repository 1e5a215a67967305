"""The cuda and hip backends: a rank drives one GPU; ranks are processes, or threads of one.

What differs between the vendors is in their tables, kccl/gpu/cuda.py and hip.py.

A call is one kernel, enqueued on the caller's stream. The kernel waits for peers on the GPU. If it
fails, the next call or comm.check() raises the error.
"""

import contextlib
import os
from functools import partial
from typing import Any

from .. import topology
from ..base import abi, env
from ..base.abi import ffi, lib
from ..base.errors import BackendError, Error, Timeout
from ..gpu import driver, sharing
from ..gpu.graphs import KernelGraph
from ..gpu.library import library_kernel, occupancy, serve
from ..gpu.state import DeviceState
from ..gpu.table import DriverError
from ..plan.specs import BY_NAME
from ..ranks.team import Connected
from ..ranks.windows import Window
from . import share
from .calls import fill_op
from .departure import depart, leave_when_collected
from .device_comm import DeviceComm
from .gpu_memory import GpuMemory
from .on_gpu import OnGpu
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


class GpuBackend(OnGpu):
    """One rank's memory and calls on a GPU."""

    def __init__(
        self,
        device: driver.Device,
        mesh: Connected,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
        exchanges: bool = True,
    ) -> None:
        """See Opener.

        Args:
            device: The GPU of this rank.
            exchanges: Whether kernels exchange data with other ranks. If not, none is compiled
                ahead of its first call.
        """
        variables = env.read()
        super().__init__(device)
        self._pid = os.getpid()
        is_lazy = variables.preload == "all" and not exchanges
        serve(device, mesh.world_size, "cached" if is_lazy else variables.preload)
        # Ranks that share a GPU use no programmatic dependents: their waiting blocks would fill it.
        self._shares_gpu = are_threads and mesh.world_size > driver.num_devices()
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
        self.queue = self.state.queue
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

    # ---- Streams -----------------------------------------------------------------------------

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
    """Returns how many counters grid_sync uses, by the dies of the machine's first AMD GPU. None
    means as many as the target has.

    Args:
        layout: KCCL_LAYOUT, as in Env.
    """
    if driver.table().backend != "hip":
        return None  # CUDA's kernels have one counter.
    try:
        machine = topology.amd_gpus()
    except (OSError, ValueError):
        machine = None  # The driver's figures contradict each other. Kernels run with any number.
    number = topology.grid_counters(machine, layout)
    return None if number is None else min(number, lib.kKcclGridCounters)
