"""The host backend for more ranks than one team (a group of at most 8 ranks, kccl/ranks/team.py)
can have: each rank is in two teams, and makes each call in steps.

Each team is a HostBackend with its own scratch and state. Where the ranks are on several nodes, a
node's ranks are a group, and the team across groups is a BetweenNodes. A record of a failure has
ranks' numbers in a team: csrc/host/chain.cpp translates them to numbers in the communicator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any, NoReturn

from ..base import abi, arrays, dtypes, env, strided
from ..base.abi import ffi, lib
from ..base.errors import InvalidArgument
from ..plan.grouping import MOST_GROUPED_RANKS, Grouping
from ..plan.spec import Request
from ..plan.specs import BY_NAME
from ..plan.steps import Message, Step, Steps
from ..ranks.mesh import Mesh
from ..ranks.nodes import groups_of
from ..ranks.team import Team, agree_on_groups
from ..ranks.windows import Window
from . import host_launch, host_memory, host_state, no_streams
from .base import Backend
from .calls import fill_call
from .host import HostBackend, polls_per_check
from .host_memory import HostMemory
from .messages import Messages, messages_of
from .nodes import BetweenNodes
from .postings import Postings
from .routes import Routes
from .settings import Settings
from .team_state import TeamState
from .temporaries import Temporaries

_KINDS = {
    "copy": lib.kKcclCopyStep,
    "convert": lib.kKcclConvertStep,
    "reduce": lib.kKcclReduceStep,
}


def _grouping(mesh: Mesh, timeout: float) -> Grouping:
    """Returns the groups of a mesh's ranks. If there are several nodes, the nodes are the groups.
    Collective.
    """
    if mesh.homes:
        return Grouping(groups_of(mesh.homes), are_nodes=True)
    return Grouping(agree_on_groups(mesh, env.read().layout, timeout))


class OnHost:
    """See Opener: makes the backends of a rank on the host."""

    name = "host"
    most_ranks = MOST_GROUPED_RANKS
    spans_nodes = True
    settings = staticmethod(HostBackend.settings)

    def __call__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> Backend:
        """See Opener."""
        is_team = mesh.world_size <= abi.MAX_WORLD_SIZE and not mesh.homes
        make = HostBackend if is_team else GroupedBackend
        return make(
            mesh, settings, shares_cores=shares_cores, are_threads=are_threads, timeout=timeout
        )


class GroupedBackend(Backend):
    """One rank's memory and calls on the host, in a communicator of groups.

    Attributes:
        teams: The rank's teams, as kccl/plan/grouping.py numbers them.
    """

    name = "host"
    has_streams = False
    has_virtual_time = False
    can_attach = False
    caveat = ""
    grouping: Grouping

    view = staticmethod(arrays.view)
    array = staticmethod(host_memory.array)
    like = staticmethod(host_memory.like)
    copied = staticmethod(strided.on_host)
    stream = staticmethod(no_streams.stream)
    # Only backends with streams have these methods. Here they raise.
    stream_of_prepared = as_graph = intervals_us = shape_of = no_streams.not_here
    answers = is_captured = no_streams.not_here

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """See Opener."""
        self.grouping = _grouping(mesh, timeout)
        self.teams = [Team(mesh, ranks) for ranks in self.grouping.teams_of(mesh.rank)]
        ways: dict[str, Any] = {"shares_cores": shares_cores, "are_threads": are_threads}
        ways |= {"timeout": timeout}
        group, across = self.teams
        self._backends: list[HostBackend | BetweenNodes] = [HostBackend(group, settings, **ways)]
        if self.grouping.are_nodes:
            wide = BetweenNodes(mesh, across, shares_cores=shares_cores, timeout=timeout)
            self._backends.append(wide)
        else:
            self._backends.append(HostBackend(across, settings, **ways))
        self._memory = HostMemory(mesh)
        # C reads from this context whether a call is under way and whether calls hold the GIL.
        # Waits use the contexts of the teams instead.
        self.context = ffi.new("KcclHostContext *")
        self.context.holds_gil = not are_threads
        self.context.shares_cores = shares_cores
        own = host_state.new_state(self.context)
        self.state = TeamState(own, [each.state for each in self._backends])
        self._shared = ffi.new("KcclHostTeams *")
        self._shared.state = int(ffi.cast("uintptr_t", own))
        self._shared.rank = mesh.rank
        for i, (team, backend) in enumerate(zip(self.teams, self._backends, strict=True)):
            self._shared.team[i].comm = backend.comm[0]
            self._shared.team[i].ranks = team.ranks
            if isinstance(backend, BetweenNodes):
                self._shared.team[i].nodes = backend.address
        # The KcclDeviceComm of the whole call, with numbers of ranks in the communicator. The
        # kernels of the steps get their team's.
        self._comm = ffi.new("KcclDeviceComm *")
        self._comm.abi_version = abi.ABI_VERSION
        self._comm.rank, self._comm.world_size = mesh.rank, mesh.world_size
        self._comm.state = self._shared.state
        self._comm.polls_per_check = polls_per_check(shares_cores=shares_cores)
        wide_team = self._backends[1]
        self._routes = Routes(
            mesh,
            group,
            wide_team if isinstance(wide_team, BetweenNodes) else None,
            self._shared,
            self._comm.polls_per_check,
            timeout,
        )
        self._shared.routes = int(ffi.cast("uintptr_t", self._routes.handle))
        self._messages = Messages(self.context, self._comm, routes=self._routes)
        self._postings: Postings | None = None
        if not self.grouping.are_nodes:
            self._postings = Postings(mesh, settings.num_channels, timeout)
            self._shared.postings = int(ffi.cast("uintptr_t", self._postings.handle))
        self._temporaries = Temporaries(host_memory.anonymous)
        # Memory through which the steps of one call pass data to each other.
        self._of_steps = Temporaries(host_memory.anonymous)

    # ---- Memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout: float) -> Window:
        """See Backend: every rank maps every other's part."""
        if self.grouping.are_nodes:
            raise self._too_many("windows are")
        return self._memory.window(nbytes, "window", timeout)

    def comm_for_kernels(self, *_: Any) -> NoReturn:
        """See Backend."""
        raise self._too_many("device_comm() is")

    def _too_many(self, what: str) -> InvalidArgument:
        return InvalidArgument(self.grouping.refusal(what))

    def temporary(self, nbytes: int, channel: int) -> int:
        """See Backend."""
        return self._temporaries.room(nbytes, channel)

    # ---- Calls -------------------------------------------------------------------------------

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
        """See Backend. Refuses all calls except those that need no team."""
        if kernel not in ("put", "get", "send", "recv", "scale", "narrow", "rms_norm"):
            raise self._too_many(f"{kernel}() is")
        handle = ffi.new("KcclHostOp *")
        fill_call(handle.call, self._comm, kernel, dtype, op, **fields)
        handle.bytes_per_count = 1
        if lib.kccl_host_bind(handle) != 0:
            raise AssertionError(f"no kernel {kernel}")
        return handle

    @property
    def teams_address(self) -> int:
        """Returns the address of the rank's KcclHostTeams."""
        return int(ffi.cast("uintptr_t", self._shared))

    def chain(
        self,
        make: Callable[..., Steps],
        request: Request,
        channel: int,
        *,
        moved: int | None = None,
        **fields: Any,
    ) -> Any:
        """Returns a KcclHostOp for a call of several steps. The caller keeps it alive, as with
        call().

        Args:
            make: Makes the steps from `fields`.
            request: The call.
            channel: The channel of all steps.
            moved: See Plan.handle().
            fields: KcclCall's other fields.
        """
        made = make(**fields)
        self._shared.temporary = self._of_steps.room(made.temporary_bytes)
        steps = ffi.new("KcclHostStep[]", len(made.steps))
        takes = [
            self._fill_step(filled, step, channel)
            for filled, step in zip(steps, made.steps, strict=True)
        ]
        chain = ffi.new("KcclHostChain *")
        chain.op.call.comm = self._comm[0]
        count = fields.get("count", 0)
        chain.op.call.count = count
        chain.op.bytes_per_count = request.nbytes // count if count else 0
        chain.teams, chain.steps, chain.num_steps = self._shared, steps, len(made.steps)
        if lib.kccl_host_bind_chain(chain) != 0:
            raise AssertionError(f"a step of {made.steps} has no kernel: the planner let it pass")
        for filled, step in zip(steps, made.steps, strict=True):
            if step.only_moves:
                # The ranks compare dtype in each step. Within a reduction (`moved` is None) a step
                # that only moves bytes gets no type, so that an error names none.
                filled.op.call.dtype = lib.kKcclNumDtypes if moved is None else moved
        # The returned KcclHostOp is the first member of the KcclHostChain, and keeps it alive.
        keep = chain, steps, takes
        return ffi.gc(ffi.addressof(chain, "op"), lambda _, keep=keep: None)

    def parts(self, sends: Sequence[int], receives: Sequence[int], channel: int) -> Any:
        """Returns a KcclHostOp for a call in which each part is a message (csrc/host/parts.inc).
        The caller keeps it alive, as with call().

        Args:
            sends, receives: Bytes of the part for each rank, and from each rank.
            channel: The channel.
        """
        own = self._comm.rank
        # Not all ranks begin with the same one.
        peers = [*range(own + 1, len(sends)), *range(own)]
        lengths = {0: sends, 1: receives}
        begins = {way: list(accumulate(each, initial=0)) for way, each in lengths.items()}
        ways = [(peer, way) for way in lengths for peer in peers]
        parts = [
            Message(peer, begins[way][peer], lengths[way][peer], receives=way == 1)
            for peer, way in ways
        ]
        messages, offsets = messages_of(parts, "all_to_all_parts", channel)
        made = ffi.new("KcclHostParts *")
        made.op.call.comm = self._comm[0]
        made.op.call.count, made.op.bytes_per_count = sum(sends) + sum(receives), 1
        made.messages, made.offsets, made.num_messages = messages, offsets, len(ways)
        made.num_input, made.num_own = sum(sends), sends[own]
        made.own_from, made.own_to = begins[0][own], begins[1][own]
        made.temporary = self._of_steps.room(made.num_input)
        lib.kccl_host_bind_parts(made)
        keep = made, messages, offsets
        return ffi.gc(ffi.addressof(made, "op"), lambda _, keep=keep: None)

    def _fill_step(self, filled: Any, step: Step, channel: int) -> Any:
        """Fills a KcclHostStep. Returns an object to which it refers, which the caller must keep
        alive; None if there is none.
        """
        filled.kind = _KINDS.get(step.kernel, lib.kKcclTeamStep)
        filled.team = step.team or 0
        for place, part in (("from", step.source), ("to", step.target)):
            setattr(filled, place, part.place.value)
            setattr(filled, f"{place}_offset", part.offset)
        filled.to_dtype, filled.divisor = abi.DTYPES[step.to_dtype], step.divisor
        words: Mapping[str, Any] = {"count": step.count, "channel": channel, "peer": step.peer}
        if step.posted is not None:
            fill_call(filled.op.call, self._comm, step.kernel, step.dtype, step.op, **words)
            filled.kind, filled.op.is_new = lib.kKcclPostStep, True
            filled.op.bytes_per_count = BY_NAME[step.kernel].peer_bytes(1, step.dtype)
            filled.num_posted, filled.num_takes = step.posted, len(step.takes)
            filled.compares_always = step.compares_always
            takes = ffi.new("KcclTake[]", [asdict(take) for take in step.takes])
            filled.takes = int(ffi.cast("uintptr_t", takes))
            return takes
        if step.messages:
            filled.kind, filled.num_messages = lib.kKcclMessageStep, len(step.messages)
            keep = messages_of(step.messages, step.kernel, channel)
            filled.messages, filled.offsets = keep
            return keep
        if step.team is None:
            filled.op.call.dtype, filled.op.call.op = abi.DTYPES[step.dtype], abi.OPS[step.op]
            filled.op.call.count, filled.num_rows = step.count, step.rows
            filled.last_from = lib.kKcclBehind
            if step.last is not None:
                filled.last_from = step.last.place.value
                filled.last_offset = step.last.offset
            filled.op.bytes_per_count = dtypes.of(step.dtype).itemsize
            return None
        comm = self._backends[step.team].comm
        filled.number = step.number
        fill_call(filled.op.call, comm, step.kernel, step.dtype, step.op, **words)
        filled.op.is_new = True
        if step.between_nodes:
            filled.kind, filled.op.is_new = lib.kKcclNodesStep, False
            filled.nodes_call = abi.NODES_CALLS[step.between_nodes]
            filled.op.bytes_per_count = BY_NAME[step.kernel].peer_bytes(1, step.dtype)
        return None

    def check_shape(self, blocks: Any, threads: Any) -> None:
        """See Backend: calls here have no shape."""
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
        shape = {"grid": grid, "shared_bytes": shared_bytes}
        host_launch.run(kernel.entry, data, **shape, context=self.context, abort=self.abort)

    # ---- Failure, recovery, end --------------------------------------------------------------

    def failure(self) -> None:
        """See Backend. Returns None, because the state has every failure."""

    def simulated_waits(self) -> str | None:
        """See Backend."""
        return None

    def abort(self) -> None:
        """See Backend."""
        with self._backends[0].dropping, self._backends[1].dropping:
            if not self._backends[0].is_dropped:
                lib.kccl_host_abort_teams(self._shared)

    def leave(self) -> None:
        """See Backend."""
        self._routes.leave()
        for each in self._backends:
            each.leave()

    def drop_memory(self) -> None:
        """See Backend."""
        with self._backends[0].dropping, self._backends[1].dropping:
            for each in self._backends:
                each.drop_memory()
            self._routes.drop()
            self._temporaries.drop()
            self._of_steps.drop()
            if self._postings is not None:
                self._postings.drop()

    def wait_for_calls(self, what: str) -> None:
        """See Backend: a call here returns when it has ended."""

    def clear(self) -> None:
        """See Backend."""
        for each in self._backends:
            each.clear()
        self._messages.clear()
        if self._postings is not None:
            self._postings.clear()
        host_state.clear_state(self.state.own)
