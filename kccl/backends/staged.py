"""The cuda and hip backends for ranks on several nodes, which have no memory in common.

A call is made on the host (grouped.py): inside a node through shared memory, between nodes by MPI.
The GPU copies the call's arrays to pinned host memory and back, piece by piece (plan/pieces.py),
and copies one piece while the ranks exchange another. csrc/host/staged.cpp does both.

A call waits for the work before it on its stream, and returns when the last copy to the GPU is
enqueued. So it cannot be part of a graph.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..base.abi import ffi, lib
from ..base.errors import Error, InvalidArgument, Timeout
from ..base.failure import AFTER_RESET
from ..gpu import driver, release
from ..gpu.memory import Memory
from ..gpu.table import DriverError
from ..plan import pieces
from ..plan.pieces import MOST_BYTES, Piece, Row
from ..plan.spec import Request
from ..plan.steps import Steps
from ..ranks.mesh import Mesh
from ..ranks.team import Team
from ..ranks.windows import Window
from .gpu import GpuBackend
from .grouped import GroupedBackend
from .host import HostBackend
from .on_gpu import OnGpu
from .settings import Settings
from .team_state import TeamState
from .temporaries import Temporaries

# The kernels that need no other rank. They run on the GPU.
_ALONE = ("scale", "narrow", "rms_norm")
# KcclStagedFunction -> the function that failed: a word of Names.
_FUNCTIONS = {
    lib.kKcclStagedToHost: "copy_to_host",
    lib.kKcclStagedToDevice: "copy_to_device",
    lib.kKcclStagedRecord: "record_event",
    lib.kKcclStagedQuery: "query_event",
}


class StagedBackend(OnGpu):
    """One rank's memory and calls on a GPU, in a communicator that spans nodes."""

    def __init__(
        self,
        device: driver.Device,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """See Opener; `device` is the rank's."""
        super().__init__(device)
        ways: dict[str, Any] = {"shares_cores": shares_cores, "are_threads": are_threads}
        ways |= {"timeout": timeout}
        on_host = HostBackend.settings(settings.epoch_bits)
        self._host = GroupedBackend(mesh, on_host, **ways)
        self.grouping = grouping = self._host.grouping
        # For calls that need no other rank.
        group = grouping.teams_of(mesh.rank)[0]
        self._gpu = GpuBackend(device, Team(mesh, group), settings, exchanges=False, **ways)
        self.queue, self.caveat = self._gpu.queue, ""
        self.context = self._host.context
        own = self._host.state.own
        self.state = TeamState(own, [self._host.state, self._gpu.state])
        self._rank, self._world_size = mesh.rank, mesh.world_size
        self._staging, events = _staging(device, self._host.teams_address)
        ends = tuple((driver.table().names.destroy_event, (event,)) for event in events)
        release.at_end(self, device, ends, [device])
        # Two slots, each with the input and the output of a piece.
        self._slots = Memory(device, lib.kKcclStagedSlots * 2 * MOST_BYTES, None, on_host=True)
        self._rooms = Temporaries(self._pinned)

    def _pinned(self, nbytes: int) -> tuple[int, Memory]:
        memory = Memory(self.device, nbytes, None, on_host=True)
        return memory.address, memory

    # ---- Memory and streams: as in a communicator of one node ---------------------------------

    def allocate(self, nbytes: int, timeout: float) -> Window:
        """See Backend: windows are for ranks that share memory."""
        return self._host.allocate(nbytes, timeout)

    def comm_for_kernels(self, *_: Any) -> NoReturn:
        """See Backend."""
        self._host.comm_for_kernels()

    def temporary(self, nbytes: int, channel: int) -> int:
        """See Backend."""
        return self._gpu.temporary(nbytes, channel)

    def as_graph(self, handle: Any) -> None:
        """See Backend: no call is one kernel."""

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
        """See Backend. Refuses all calls except those that need no other rank."""
        if kernel not in _ALONE:
            what = "send() and recv() are" if kernel == "send_recv" else f"{kernel}() is"
            raise InvalidArgument(self._host.grouping.refusal(f"on GPUs {what}"))
        handle = self._gpu.call(kernel, shape, dtype=dtype, op=op, **fields)
        # A launch that fails must fail the communicator.
        handle.call.comm.state = int(ffi.cast("uintptr_t", self.state.own))
        return handle

    def chain(
        self,
        make: Callable[..., Steps],
        request: Request,
        channel: int,
        *,
        moved: int | None = None,
        **fields: Any,
    ) -> Any:
        """See GroupedBackend.chain()."""
        made = pieces.pieces(request.collective, self._world_size, self._rank, fields)
        handles: dict[int, Any] = {}
        for each in made:
            if each.count not in handles:
                part = {**fields, "count": each.count} if "count" in fields else fields
                handles[each.count] = self._host.chain(make, request, channel, moved=moved, **part)
        return self._staged(made, [handles[each.count] for each in made])

    def parts(self, sends: Sequence[int], receives: Sequence[int], channel: int) -> Any:
        """See GroupedBackend.parts()."""
        fields = {"sends": sends, "receives": receives}
        made = pieces.pieces("all_to_all", self._world_size, self._rank, fields)
        return self._staged(made, [self._host.parts(sends, receives, channel)])

    def _staged(self, made: Sequence[Piece], handles: Sequence[Any]) -> Any:
        """Returns a KcclHostOp for a call in pieces; `handles` has the call of each on the host."""
        filled = ffi.new("KcclStagedPiece[]", len(made))
        keep: list[Any] = [filled, handles]
        half = MOST_BYTES
        begin = self._slots.address
        if pieces.longest(made) > half:
            # One piece, which is longer than a slot.
            half = -(-pieces.longest(made) // 4096) * 4096
            begin = self._rooms.room(2 * half)
        for i, (each, piece, handle) in enumerate(zip(filled, made, handles, strict=True)):
            slot = begin + i % lib.kKcclStagedSlots * 2 * half
            output = slot if piece.is_in_place else slot + half
            each.op, each.input, each.output = handle, slot, output
            each.num_in, each.num_out = len(piece.reads), len(piece.writes)
            for name, at, rows in (("in", slot, piece.reads), ("out", output, piece.writes)):
                copies = _copies(rows, at)
                keep.append(copies)
                setattr(each, name, copies)
        staged = ffi.new("KcclStagedOp *")
        staged.op.op.call = handles[0].call
        staged.op.op.kernel = lib.kccl_run_staged
        staged.op.op.bytes_per_count = handles[0].bytes_per_count
        staged.op.queue = self.queue
        staged.op.stream = driver.legacy_stream()
        staged.staging, staged.pieces, staged.num_pieces = self._staging, filled, len(made)
        return ffi.gc(ffi.addressof(staged, "op", "op"), lambda _, kept=(staged, keep): None)

    def check_shape(self, blocks: Any, threads: Any) -> None:
        """See Backend: calls here have no shape."""
        self._host.check_shape(blocks, threads)

    def shape_of(self, handle: Any) -> tuple[int, int]:
        """See Backend: no kernel makes a call."""
        return 0, 0

    # ---- Failure, recovery, end --------------------------------------------------------------

    def failure(self) -> Error | None:
        """See Backend: what this rank refused, or a launch that the driver refused. The call can
        be made again, unless it had begun: then the communicator has failed on all ranks.
        """
        error = self._gpu.failure()
        if error is not None:
            self.state.own.status = lib.kKcclOk
            return error
        staging = self._staging
        why, staging.refusal = staging.refusal, 0
        if why == 0:
            return None
        if not staging.has_failed:
            self.state.own.status = lib.kKcclOk
        return self._refusal(why, AFTER_RESET if staging.has_failed else "")

    def _refusal(self, why: int, end: str) -> Error:
        if why == lib.kKcclStagedCapture:
            return InvalidArgument(
                f"rank {self._rank}: the stream is being captured, and a graph cannot contain "
                "calls between nodes, which the host makes: make them outside of captures"
            )
        if why == lib.kKcclStagedStream:
            state = self.state
            limit_s = (state.limit_ns if state.contacted else state.first_limit_ns) / 1e9
            return Timeout(
                f"rank {self._rank}: the work before the call on its stream did not end within "
                f"{limit_s:.3g} s (comm.timeout is the limit); {end}",
                rank=self._rank,
                waited_s=limit_s,
            )
        gpu, error = driver.table(), self._staging.error
        word = _FUNCTIONS.get(self._staging.failed)
        name = gpu.queue["push_context"] if word is None else getattr(gpu.names, word)
        return DriverError(gpu.error_text(name, error, end and f"({end})"), error)

    def simulated_waits(self) -> str | None:
        """See Backend."""
        return None

    def abort(self) -> None:
        """See Backend."""
        self._host.abort()
        self._gpu.abort()

    def leave(self) -> None:
        """See Backend; waits for this rank's work on the GPU first, unless it has failed."""
        self._gpu.leave()
        self._host.leave()

    def drop_memory(self) -> None:
        """See Backend."""
        self._host.drop_memory()
        self._gpu.drop_memory()

    def wait_for_calls(self, what: str) -> None:
        """See Backend."""
        self._gpu.wait_for_calls(what)

    def clear(self) -> None:
        """See Backend."""
        self._gpu.clear()
        self._host.clear()
        self._staging.has_failed = 0
        for slot in range(lib.kKcclStagedSlots):
            self._staging.has_left[slot] = 0


def _copies(rows: Sequence[Row], begin: int) -> Any:
    copies = [(each.offset, begin + each.place, each.num_bytes) for each in rows]
    return ffi.new("KcclStagedRow[]", copies)


def _staging(device: driver.Device, teams: int) -> tuple[Any, list[Any]]:
    """Returns a KcclStaging, and its events, which the caller destroys."""
    gpu, names = driver.table(), driver.table().names
    staging = ffi.new("KcclStaging *")
    for word in _FUNCTIONS.values():
        setattr(staging, word, gpu.function_address(getattr(names, word)))
    staging.teams, staging.not_ready = teams, gpu.not_ready
    with device.current():
        events = [gpu.call(names.create_event, 0) for _ in range(2 * lib.kKcclStagedSlots)]
    for slot in range(lib.kKcclStagedSlots):
        staging.arrived[slot] = int(events[slot])
        staging.left[slot] = int(events[lib.kKcclStagedSlots + slot])
    return staging, events
