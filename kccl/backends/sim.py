"""The sim backend: ranks are threads of this process on one simulated machine (csrc/sim)."""

import mmap
from collections.abc import Mapping
from typing import Any

from ..base.abi import ffi, lib
from ..base.errors import Error, InvalidArgument
from ..plan.specs import BY_NAME
from ..ranks.mesh import Mesh
from ..ranks.windows import Window
from ..sim.machine import launch_of
from ..sim.mesh import SimMesh
from ..sim.regions import Namer, bytes_namer, state_namer, window_namer
from .base import Backend, Settings, fill_op

# Threads of a call's one block, by bytes of the message: more threads take fewer turns, and cost
# the simulation more.
_FEWEST_THREADS, _MOST_THREADS = 64, 512
_BYTES_PER_THREAD = 64


def num_threads(kernel: str, count: int, dtype: str) -> int:
    """Threads of a call's block; the same on all ranks, for either warp size."""
    nbytes = BY_NAME[kernel].peer_bytes(count, dtype)
    wanted = -(-nbytes // (_BYTES_PER_THREAD * _FEWEST_THREADS)) * _FEWEST_THREADS
    return min(max(wanted, _FEWEST_THREADS), _MOST_THREADS)


class SimWindow(Window):
    """A window of ranks that are threads: one mapping for all, at one address.

    The machine knows memory by its address, and keeps it as long as it lives.
    """

    def __init__(self, mesh: SimMesh, nbytes: int, what: str, timeout: float, name: Namer) -> None:
        self._machine = mesh.meetings.machine
        self._machine_rank = mesh.machine_rank
        self._name = name
        super().__init__(mesh, nbytes, what, timeout)

    def _map(self, what: str, timeout: float) -> list[mmap.mmap]:
        mine = mmap.mmap(-1, self.nbytes)
        address = int(ffi.cast("uintptr_t", ffi.from_buffer(mine)))
        self._machine.add_window(self._machine_rank, address, self.nbytes, mine, self._name)
        everyone = self.mesh.allgather(str(address).encode(), what, timeout)
        return [self._machine.windows[int(theirs)] for theirs in everyone]


class SimBackend(Backend):
    """One rank's memory and calls on the simulated machine."""

    name = "sim"

    def __init__(self, mesh: Mesh, settings: Settings, *, timeout: float, **_: bool) -> None:
        """See Backend; the ranks are threads, and share their cores with the simulation."""
        assert isinstance(mesh, SimMesh)
        self._machine = mesh.meetings.machine
        self._machine_rank = mesh.machine_rank
        self._num_windows = 0
        super().__init__(
            mesh, settings, shares_cores=True, are_threads=True, polls_per_check=1, timeout=timeout
        )
        self._machine.add_state(self.state, state_namer(mesh.rank))

    def _open_window(
        self,
        mesh: Mesh,
        nbytes: int,
        what: str,
        timeout: float,
        layout: Mapping[str, int] | None = None,
    ) -> Window:
        assert isinstance(mesh, SimMesh)
        if layout is not None:
            name = window_namer(layout, mesh.world_size, mesh.rank)
        else:
            name = bytes_namer(f"window {self._num_windows} of rank {mesh.rank}")
            self._num_windows += 1
        return SimWindow(mesh, nbytes, what, timeout, name)

    def op(
        self,
        kernel: str,
        shape: tuple[int, int] = (0, 0),
        *,
        dtype: str = "float32",
        op: str = "sum",
        **fields: int,
    ) -> Any:
        """See Backend."""
        sim_op = ffi.new("KcclSimOp *")
        fill_op(sim_op.op, self._comm, kernel, dtype, op, **fields)
        entry = self._machine.kernel(kernel, dtype, op)
        sim_op.op.kernel = lib.kccl_sim_run_op
        sim_op.machine = self._machine.handle
        sim_op.launch.entry = ffi.cast("void (*)(const void *)", entry.address)
        sim_op.launch.argument_bytes = ffi.sizeof("KcclCall")
        sim_op.launch.num_blocks = 1
        sim_op.launch.threads_per_block = num_threads(kernel, fields.get("count", 0), dtype)
        sim_op.launch.rank = self._machine_rank
        # A KcclHostOp that keeps the KcclSimOp around it.
        return ffi.gc(ffi.addressof(sim_op, "op"), lambda _, owner=sim_op: None)

    def launch(
        self,
        kernel: Any,
        data: bytes,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        stream: int = 0,
    ) -> None:
        """See Backend."""
        warp_size = self._machine.simulation.warp_size
        if kernel.module.warp_size != warp_size:
            raise InvalidArgument(
                f"{kernel.name} was compiled with warp_size {kernel.module.warp_size}, must be the "
                f"simulation's {warp_size}"
            )
        launch, _arguments = launch_of(
            self._machine_rank,
            kernel.entry,
            data,
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
        )
        if not self._machine.launch(launch) and self.state.status == lib.kKcclOk:
            self.state.status = lib.kKcclAborted

    def failure(self) -> Error | None:
        """What the machine has found."""
        return self._machine.failure()

    def clear(self) -> None:
        """See Backend."""
        super().clear()
        for scratch in self._scratches:
            self._machine.forget(
                self._machine_rank,
                scratch.window.addresses[self._mesh.rank],
                scratch.window.nbytes,
                self.state,
            )
