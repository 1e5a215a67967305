"""The sim backend: ranks are threads of this process on one simulated machine (csrc/sim)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .. import topology
from ..base import arrays, env, memory, strided
from ..base.abi import MAX_WORLD_SIZE, ffi, lib
from ..base.errors import Error, InvalidArgument
from ..base.mapping import map_shared
from ..plan.limits import LIMITS, not_resident
from ..plan.specs import BY_NAME
from ..ranks.mesh import Mesh
from ..ranks.windows import HostWindow, Window, agree_on_size
from ..sim.launch_arrays import launch_of, parameters_of
from ..sim.mesh import SimMesh
from ..sim.regions import Namer, bytes_namer, state_namer, window_namer
from . import host_memory, host_state, no_streams
from .base import Backend
from .calls import fill_op
from .device_comm import DeviceComm
from .host_memory import HostChannels
from .scratch import Scratches
from .settings import Settings
from .shapes import longest_row, row_threads
from .temporaries import Temporaries

# Threads of a call's one block, by bytes of the message: more threads need fewer rounds, but make
# the simulation slower.
_FEWEST_THREADS, _MOST_THREADS = 64, 512
_BYTES_PER_THREAD = 64
# Bytes of all pipes from one peer, for send and recv. Each channel has one pipe.
_MESSAGE_BYTES = 262144


def num_threads(kernel: str, count: int, dtype: str, width: int = 0) -> int:
    """Returns the number of threads of a call's one block. It is the same on all ranks, and a
    multiple of both warp sizes.

    `width` is the elements of a row, for kernels whose blocks take whole rows.
    """
    spec = BY_NAME[kernel]
    if spec.takes_rows:
        return min(row_threads(spec, width, dtype, _FEWEST_THREADS), _MOST_THREADS)
    nbytes = spec.peer_bytes(count, dtype)
    wanted = -(-nbytes // (_BYTES_PER_THREAD * _FEWEST_THREADS)) * _FEWEST_THREADS
    return min(max(wanted, _FEWEST_THREADS), _MOST_THREADS)


class SimMemory:
    """See scratch.Memory. Tells the machine the names of the windows' regions, for its reports."""

    arm = staticmethod(host_memory.arm)

    def __init__(self, mesh: SimMesh) -> None:
        self._mesh = mesh
        self._num_windows = 0

    def channels(self, count: int) -> HostChannels:
        """See scratch.Memory."""
        made = HostChannels(count)
        self._mesh.meetings.machine.add_memory(
            self._mesh.machine_rank,
            made.address,
            count * ffi.sizeof("KcclChannelState"),
            made,
            bytes_namer(f"the channels' states of rank {self._mesh.rank}"),
            f"the states of {count} channels of rank",
        )
        return made

    def window(
        self, nbytes: int, what: str, timeout: float, layout: Mapping[str, int] | None = None
    ) -> HostWindow:
        """See scratch.Memory."""
        mesh = self._mesh
        if layout is not None:
            whole = f"the communicator's own window of rank {mesh.rank}"
            name = window_namer(layout, mesh.world_size, mesh.rank)
        else:
            whole = f"window {self._num_windows} of rank {mesh.rank}"
            name = bytes_namer(whole)
            self._num_windows += 1
        return self._make(nbytes, what, timeout, name, whole)

    def _make(self, nbytes: int, what: str, timeout: float, name: Namer, whole: str) -> HostWindow:
        """Returns a window. The ranks are threads, so all use the same mapping of each part.

        The machine finds memory by its address, so it keeps the mappings until drop() of the window
        or the machine's end.
        """
        mesh, machine = self._mesh, self._mesh.meetings.machine
        with mesh.together(what, timeout) as undo:
            agree_on_size(mesh, nbytes, what, timeout)
            memory.check_room(nbytes, mesh.world_size)
            mine = map_shared(-1, nbytes)
            address = int(ffi.cast("uintptr_t", ffi.from_buffer(mine)))
            machine.add_window(mesh.machine_rank, address, nbytes, mine, name, whole)
            undo.callback(machine.remove_window, address)
            everyone = mesh.allgather(str(address).encode(), what, timeout)
            maps = [machine.windows[int(theirs)] for theirs in everyone]
            window = HostWindow(mesh, maps, partial(machine.remove_window, address))
            machine.made.add(window)
            return window


class SimBackend(Backend):
    """One rank's memory and calls on the simulated machine."""

    name = "sim"
    most_ranks = MAX_WORLD_SIZE
    spans_nodes = False
    can_attach = False
    has_streams = False
    has_virtual_time = True
    caveat = ""

    view = staticmethod(arrays.view)
    array = staticmethod(host_memory.array)
    like = staticmethod(host_memory.like)
    copied = staticmethod(strided.on_host)
    stream = staticmethod(no_streams.stream)
    # Only backends with streams have these methods. Here they raise.
    stream_of_prepared = as_graph = intervals_us = shape_of = no_streams.not_here

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """See Opener. The ranks are always threads, and share their cores with the simulation."""
        assert isinstance(mesh, SimMesh)
        self._mesh = mesh
        self._machine = mesh.meetings.machine
        self.context = host_state.new_context(mesh, shares_cores=True, are_threads=True)
        self.state = host_state.new_state(self.context)
        self._memory = SimMemory(mesh)
        self._temporaries = Temporaries(host_memory.anonymous)
        self._scratches = Scratches(
            mesh,
            settings,
            self._memory,
            state=self.state,
            polls_per_check=1,
            timeout=timeout,
            # The simulated machine has no topology. This class is given no Env, so it reads one.
            grid_counters=topology.grid_counters(None, env.read().layout),
        )
        self.longest_row = longest_row(settings.packet_bytes, mesh.world_size)
        namer = state_namer(mesh.rank)
        self._machine.add_state(mesh.machine_rank, self.state, namer, mesh.machine_ranks)
        host_state.leave_when_collected(self, self._scratches, self.state, self.context)

    @staticmethod
    def settings(epoch_bits: int) -> Settings:
        """See Opener."""
        return Settings(message_bytes=_MESSAGE_BYTES, epoch_bits=epoch_bits)

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

    def answers(self, nbytes: int) -> tuple[int, Any]:
        """See Backend."""
        return host_memory.anonymous(nbytes)

    def is_captured(self, stream: int) -> bool:
        """See Backend: the simulator has no graphs."""
        return False

    def set_stream(self, handle: Any, stream: int) -> None:
        """See Backend: a call here has no stream."""

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
        sim_op = ffi.new("KcclSimOp *")
        fill_op(sim_op.op, self._scratches.comm, kernel, dtype, op, **fields)
        entry = self._machine.kernel(kernel, dtype, op)
        sim_op.op.kernel = lib.kccl_sim_run_op
        sim_op.machine = self._machine.handle
        sim_op.launch.entry = ffi.cast("void (*)(const void *)", entry.address)
        sim_op.launch.argument_bytes = ffi.sizeof("KcclCall")
        # Each message has a block, so that messages do not wait for each other.
        sim_op.launch.num_blocks = max(fields.get("messages", 0).bit_count(), 1)
        sim_op.launch.threads_per_block = num_threads(
            kernel, fields.get("count", 0), dtype, fields.get("width", 0)
        )
        sim_op.launch.rank = self._mesh.machine_rank
        # The returned KcclHostOp is a member of the KcclSimOp, and keeps it alive.
        return ffi.gc(ffi.addressof(sim_op, "op"), lambda _, owner=sim_op: None)

    def check_shape(self, blocks: Any, threads: Any) -> None:
        """See Backend: the simulator chooses the shape of a call."""
        raise no_streams.no_shape(self.name, blocks, threads)

    def load(self, kernel: Any) -> None:
        """See Backend: code is loaded when its module is made."""

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
        warp_size = self._machine.simulation.warp_size
        if kernel.module.warp_size != warp_size:
            raise InvalidArgument(
                f"{kernel.name} was compiled with warp_size {kernel.module.warp_size}, must be the "
                f"simulation's {warp_size}"
            )
        room = self._check_limits(kernel, data, grid, block, shared_bytes)
        parameters = parameters_of(kernel.module.source, kernel.name, len(kernel.entry.parameters))
        rank = self._mesh.machine_rank
        launch, _arguments = launch_of(
            rank,
            kernel.entry,
            data,
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            most_resident=room,
            arrays=self._machine.arrays.of_launch(rank, kernel.name, parameters, arrays),
        )
        if not self._machine.launch(launch) and self.state.status == lib.kKcclOk:
            self.state.status = lib.kKcclAborted

    def _check_limits(
        self, kernel: Any, data: bytes, grid: int, block: int, shared_bytes: int
    ) -> int:
        """Raises InvalidArgument for a launch that a GPU of the simulated model would refuse.
        Returns how many of its blocks run at once.
        """
        limits = LIMITS[self._machine.simulation.model]
        limits.check_launch(shared_bytes, len(data))
        sizes = {size for size, _ in kernel.entry.parameters}
        room = limits.resident_blocks(block, shared_bytes)
        if ffi.sizeof("KcclDeviceComm") in sizes and grid > room:
            raise not_resident(grid, room, kernel.name, block)
        return room

    def failure(self) -> Error | None:
        """See Backend: what the simulation has found."""
        return self._machine.failure()

    def simulated_waits(self) -> str | None:
        """See Backend."""
        # A rank that waits for a late peer has made one call more than that peer, on one channel.
        # So a difference on one channel says nothing, unless the peer has left. A difference on two
        # channels is why the rank waits.
        has_left = self.state.record.status == lib.kKcclPeerLeft
        uneven = self._machine.uneven_calls(least=1 if has_left else 2)
        told = [f"calls that differ: {uneven}"] if uneven else []
        return "\n".join([*filter(None, [self._machine.waits()]), *told])

    def abort(self) -> None:
        """See Backend."""
        host_state.abort(self._scratches.comm)

    def leave(self) -> None:
        """See Backend."""
        lib.kccl_host_leave(self._scratches.comm)

    def drop_memory(self) -> None:
        """See Backend: the machine keeps all memory as long as it lives."""

    def wait_for_calls(self, what: str) -> None:
        """See Backend: a call here returns when it has ended."""

    def clear(self) -> None:
        """See Backend."""
        self._scratches.clear()
        host_state.clear_state(self.state)
        for window in self._scratches.windows():
            self._machine.forget(
                self._mesh.machine_rank,
                window.addresses[self._mesh.rank],
                window.nbytes,
                self.state,
            )
