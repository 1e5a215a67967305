"""Reports of the simulator's findings: who did what, at which line, and how to replay it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.abi import EXPERT_CALLS, KERNELS, OPS, ffi, kernel_name, lib, members, type_words
from ..base.errors import ProtocolError
from ..plan.spec import Counts
from ..plan.specs import KERNELS as SPECS
from .call_words import SENTENCES, lack
from .edges import edge_of, shared_name, unstarted, why_invalid
from .launch_arrays import LaunchArrays
from .regions import Regions
from .symbols import Symbols
from .waits import waiting_table

# Kind of finding -> its text. _sentence() fills the fields in, and appends call, step and seed.
_KINDS = {
    "deadlock": "deadlock: {num_waiting} threads wait and nothing can change any more: {waiting}"
    "{lack}{unstarted}",
    "divergence": "divergence: {place} waits at {user_site}{within}, and {other} {does_other}. All "
    "threads of a block or warp must come to the same barriers and calls",
    "data_race": "data race: {place} at {site} {does} {what}, {other} {did} it, and no "
    "synchronisation orders them",
    "unsynced_input": "data race: {place} at {user_site} gives {what} to {call}, {other} {did} it, "
    "and no synchronisation orders them: each thread may read all of it in {call}",
    "narrow_scope": "scope too narrow: {place} at {site} {does} {what}, {other} {did} it, and the "
    "scope of one access does not include the other thread",
    "two_writers": "two writers: {place} at {site} {does} {what}, {other} {did} it, and nothing "
    "orders the two stores",
    "reused_slot": "slot reused: {place} at {site} writes {what}, but {other} may still read its "
    "previous content",
    "stale_word": "stale word: {place} at {site} takes {what} for a word of this call, but {other} "
    "wrote it for another call",
    "late_timeout": "late time-out: {place} at {site} still waits after its time limit",
    "hung": "endless: {place} runs on at {user_site} and makes no step for longer than "
    "Simulation.hang_s. A loop that waits must read with kccl::mem::load() and call "
    "kccl::mem::poll_pause(): no other thread moves while one reads plainly",
    "endless": "endless: after {step} steps the kernels have not ended; {place} is at {site}. A "
    "loop that waits must call kccl::mem::poll_pause(), so that the simulator knows that it waits",
    "invalid_access": "invalid access: {place} at {site} accesses {what}, which no GPU can{why}",
    "calls_differ": "calls differ: {place} makes {made} at {line}, and {other_place} makes "
    "{other_made} at {other_line}; {who} must make the same call",
    "opened_twice": "channel opened twice: {place} opens channel {channel} at {line} while "
    "{other_place} has it open, since {other_line}; on each rank one coop at a time has a channel "
    "open, and opens it once",
    "interrupted": "interrupted: {place} was at {site}",
    "undrained": "copy not drained: {place} at {site} starts a copy to {what}, and its block ends "
    "before the copy is there",
    "out_of_bounds": "out of bounds: {place} at {site} {does} {edge}",
    "stack_overflow": "stack overflow: {place} at {site} needs more than the 32,768 bytes that a "
    "thread of the simulator has for local variables and calls: put large arrays into block-shared "
    "memory or into an argument, and make no deep recursion",
    "overrun_local": "overrun local array: {place} has written beyond the end of a local array of "
    "the function that ends at {site}",
    "trap": "trap: {place} at {site} {edge}",
    "assertion": "assertion: {place} at {site}: {edge}",
    "too_much_shared": "too much shared memory: {place} at {site} {edge}",
}
# Kind of event -> its verb in the present and in the past.
_VERBS = {
    lib.kKcclSimLoad: ("loads", "loaded"),
    lib.kKcclSimStore: ("stores to", "stored to"),
    lib.kKcclSimRead: ("plainly reads", "plainly read"),
    lib.kKcclSimWrite: ("plainly writes", "plainly wrote"),
}
# Number of last steps in a report.
_STEPS = 16


@dataclass(frozen=True)
class Place:
    """A thread of the machine, and what it does (a KcclSimPlace).

    Attributes:
        rank, block, thread: The thread. Block -1 is the rank's host. Thread -1 is an asynchronous
            copy of the block.
        site: The source line.
        kernel, channel, epoch: The call of the library that the thread makes or made last; "", -1
            and 0 if it made none.
        is_within: True if the thread is still in that call: the line is the library's.
        user_site: The line in the user's source that led there; site if there is none.
    """

    rank: int
    block: int
    thread: int
    site: str
    kernel: str
    channel: int
    epoch: int
    is_within: bool = True
    user_site: str = ""

    def __str__(self) -> str:
        if self.block < 0:
            return f"the host of rank {self.rank}"
        if self.thread < 0:
            return f"a copy of rank {self.rank} block {self.block}"
        return f"rank {self.rank} block {self.block} thread {self.thread}"


class Reporter:
    """Turns the machine's records into text."""

    def __init__(self, regions: Regions, arrays: LaunchArrays, model: str) -> None:
        self.regions = regions
        self._arrays = arrays
        self._model = model
        self.symbols = Symbols()
        # Address of a communicator's KcclState -> its ranks, by the machine's numbers.
        self.members: dict[int, Sequence[int]] = {}
        self._kinds = {
            value: name for name, value in members("KcclSimFindingKind", "kKcclSim").items()
        }
        self._kernels = {value: name for name, value in (KERNELS | EXPERT_CALLS).items()}
        self._events = {
            value: name for name, value in members("KcclSimEventKind", "kKcclSim").items()
        }
        self._orders = list(members("KcclSimOrder", "kKcclSimOrder"))
        self._scopes = list(members("KcclSimScope", "kKcclSimScope"))

    def error(self, finding: Any, events: Sequence[Any]) -> ProtocolError:
        """Returns the exception for a KcclSimFinding.

        Args:
            finding: The finding.
            events: KcclSimEvents up to the finding, oldest first.
        """
        kind = self._kinds[finding.kind]
        named = [finding.waiting[index] for index in range(finding.num_named)]
        places = (finding.place, finding.other, *named)
        self.symbols.look_up(site for who in places for site in (who.site, who.call_site))
        place = self.place(self._seen_at(finding))
        waiting = "; ".join(f"{who} at {who.site}" for who in map(self.place, named))
        other = self.place(finding.other) if finding.other.rank >= 0 else None
        timeline = self.timeline(_relevant(finding, events))
        what = shared_name(finding) or self.name(finding.address)
        edge = edge_of(kind, finding, self.regions, self._arrays, self._model)
        if kind in ("calls_differ", "opened_twice"):
            message = self._made_sentence(kind, finding, place, other)
        else:
            message = _sentence(kind, finding, place, other, what, waiting, edge, self.name)
        return ProtocolError(
            f"{message}\nlast steps:\n{timeline}" if timeline else message,
            kind=kind,
            seed=finding.seed,
            rank=place.rank,
            block=place.block,
            thread=place.thread,
            site=place.site,
            kernel=place.kernel,
            channel=place.channel,
            epoch=place.epoch,
            other=other,
            timeline=timeline,
        )

    def _made_sentence(self, kind: str, finding: Any, place: Place, other: Place | None) -> str:
        """Returns the message of a finding about calls that two threads make."""
        assert other is not None
        is_exchange = finding.made.channel < 0
        made, other_made = "", ""
        if kind == "calls_differ":
            made, other_made = made_words(finding.made), made_words(finding.other_made)
        text = _KINDS[kind].format(
            place=place,
            other_place=other,
            line=self._caller(finding.place.site),
            other_line=self._caller(finding.other.site),
            channel=finding.made.channel,
            made=made,
            other_made=other_made,
            who="all blocks" if is_exchange else "all ranks",
        )
        return f"{text}; {_replay(finding)}"

    def _caller(self, site: int) -> str:
        """Returns the user's line that makes a call in a kernel; for a kernel of the library the
        words "a call of its program".
        """
        is_of_user = self.symbols.is_of_user(site)
        return self.symbols.user_line(site) if is_of_user else "a call of its program"

    def _seen_at(self, finding: Any) -> Any:
        """Returns the place of a finding. For a loop that makes no step, returns a place with a
        line of the user's source.
        """
        if not finding.is_hung:
            return finding.place
        seen = (finding.waiting[index] for index in range(finding.num_named))
        return next((each for each in seen if self.symbols.is_of_user(each.site)), finding.place)

    def name(self, address: int) -> str:
        """Returns the name of an address; the address itself if nothing is known of it."""
        name = self.regions.name(address)
        return (self._arrays.at(address) or name) if name.startswith("0x") else name

    def waits(self, waits: Sequence[Any]) -> str:
        """Returns what is missing first, and who waits for what (KcclSimWaits); "" if nobody."""
        self.symbols.look_up(site for each in waits for site in (each.place.site, each.call_site))
        placed = [(each, self.place(each.place), self.symbols) for each in waits]
        return waiting_table(placed, self.members)

    def counts(self, counts: Sequence[Any]) -> str:
        """Returns how many calls each rank has made, and the last one (KcclSimCounts); "" without
        counts.
        """
        self.symbols.look_up(each.place.site for each in counts if each.num_calls)
        told = ""
        for each in counts:
            # The counts go channel by channel, so rank 0 begins those of another channel.
            told += ("; " if each.rank == 0 else ", and ") if told else ""
            told += f"rank {each.rank} has made {each.num_calls} calls"
            if each.num_calls:
                told += f", the last {made_words(each.made)} at {self._caller(each.place.site)}"
        return told

    def place(self, place: Any) -> Place:
        """Returns the Place for a KcclSimPlace."""
        is_call = place.channel >= 0
        return Place(
            place.rank,
            place.block,
            place.thread,
            self._line(place),
            self._kernels.get(place.kernel, "a user's call") if is_call else "",
            place.channel,
            place.epoch if is_call else 0,
            self.symbols.is_of_library(place.site),
            self.symbols.user_line(self._user_site(place)),
        )

    def _user_site(self, place: Any) -> int:
        """Returns the code address that leads to the user's line: that of the place, or of the
        library's call in which the place is.

        Compilers do not inline all of the library, so an address in it may not lead to a user's
        line.
        """
        is_lost = self.symbols.is_of_library(place.site) and not self.symbols.is_of_user(place.site)
        return int(place.call_site if is_lost and place.call_site else place.site)

    def _line(self, place: Any) -> str:
        line, of_call = self.symbols.line(place.site), self._user_site(place)
        if of_call == place.site or place.site == 0 or not self.symbols.is_of_user(of_call):
            return line
        return f"{line}, called in {self.symbols.user_line(of_call)}"

    def timeline(self, events: Sequence[Any]) -> str:
        """Returns KcclSimEvents as text, one in each line."""
        self.symbols.look_up(event.place.site for event in events)
        return "\n".join(
            f"  {event.step:8} {self.place(event.place)!s:27} {self.event(event)} "
            f"at {self.symbols.line(event.place.site)}"
            for event in events
        )

    def event(self, event: Any) -> str:
        """Returns a KcclSimEvent as text: operation, address, value, order."""
        name = self._events[event.kind].replace("_", " ")
        address = f" {self.name(event.address)}" if event.kind in _WITH_ADDRESS else ""
        value = f" = {event.value:#x}" if event.kind in _WITH_VALUE else ""
        order = ""
        if event.kind in _WITH_ORDER:
            order = f", {self._orders[event.order]}, {self._scopes[event.scope]} scope"
        age = f", {event.age} stores old" if event.age else ""
        return f"{name}{address}{value}{order}{age}"


_REDUCE = {each.name for each in SPECS if each.counts in (Counts.ELEMENTS, Counts.CHUNK_ELEMENTS)}
_WITH_VALUE = (lib.kKcclSimLoad, lib.kKcclSimStore)
_WITH_ORDER = (*_WITH_VALUE, lib.kKcclSimFence)
_WITH_ADDRESS = (
    *(*_WITH_VALUE, lib.kKcclSimRead, lib.kKcclSimWrite),
    *(lib.kKcclSimCopyStarts, lib.kKcclSimCopyEnds),
)


def _sentence(
    kind: str,
    finding: Any,
    place: Place,
    other: Place | None,
    what: str,
    waiting: str,
    edge: str,
    name: Callable[[int], str],
) -> str:
    if kind in SENTENCES:
        text = SENTENCES[kind](finding, place, other, name)
        return f"{text}; {_replay(finding)}"
    call = str(ffi.string(finding.call).decode())
    if finding.is_hung:
        kind = "hung"
    elif kind == "data_race" and call:
        kind = "unsynced_input"
    text = _KINDS[kind].format(
        place=place,
        user_site=place.user_site,
        within="" if place.site.startswith(place.user_site) else f" (in {place.site})",
        does_other=_does_other(finding, other),
        lack=lack(finding, place, other) if kind == "deadlock" else "",
        unstarted=unstarted(finding),
        site=place.site,
        does=_VERBS.get(finding.deed, ("",))[0],
        other=_other(kind, other),
        did=_VERBS.get(finding.other_deed, ("", ""))[1],
        what=what,
        call=call,
        why=why_invalid(finding),
        num_waiting=finding.num_waiting,
        waiting=waiting,
        edge=edge,
        step=finding.step,
    )
    calls = [
        f"{'in' if who.is_within else 'after'} {who.kernel} on channel {who.channel}, "
        f"epoch {who.epoch}{whose}"
        for who, whose in ((place, ""), (other, " (the other)"))
        if who is not None and who.kernel
    ]
    within = f"; {' and '.join(calls)}" if calls else ""
    return f"{text}{within}; {_replay(finding)}"


def _replay(finding: Any) -> str:
    return f"step {finding.step} of seed {finding.seed}, which replays it"


def made_words(made: Any) -> str:
    """Returns a call (a KcclSimMade) in words."""
    kernel = kernel_name(made.kernel)
    if made.kernel == lib.kKcclGridExchange:
        words = f"an exchange of {made.num_bytes} bytes a block"
    else:
        words = kernel
        if made.kernel != lib.kKcclBarrierDirect:
            words += f" of {made.num_bytes} bytes"
    if made.kernel != lib.kKcclBarrierDirect:
        words += f", {type_words(made.dtype)}".removesuffix(", ")
    # An exchange has an operator where it is collected.
    if made.op in OPS.values() and (kernel in _REDUCE or made.kernel == lib.kKcclGridExchange):
        words += f", {_name(OPS, made.op)}"
    if kernel.startswith("broadcast"):
        words += f", from root {made.root}"
    if made.num_blocks:
        words += f", by {made.num_blocks} blocks"
    return words if made.channel < 0 else f"{words}, on channel {made.channel}"


def _name(numbers: dict[str, int], number: int) -> str:
    return next(name for name, each in numbers.items() if each == number)


def _other(kind: str, other: Place | None) -> str:
    if other is None:
        return "another thread"
    return str(other) if kind == "divergence" else f"{other} at {other.site}"


def _does_other(finding: Any, other: Place | None) -> str:
    if finding.has_ended:
        return "has ended"
    return f"waits at {'an unknown line' if other is None else other.user_site}"


def _relevant(finding: Any, events: Sequence[Any]) -> list[Any]:
    """Returns the last steps of the threads in a finding, and the last stores to words that they
    accessed.

    If a thread repeats a step, as a poll, only the last one is kept.
    """
    threads = {_thread(who) for who in (finding.place, finding.other)}
    words = {finding.address // 8}
    words |= {event.address // 8 for event in events if _thread(event.place) in threads}
    latest: dict[tuple[Any, ...], Any] = {}
    for event in events:
        is_store = event.kind == lib.kKcclSimStore and event.address // 8 in words
        if _thread(event.place) in threads or is_store:
            key = (*_thread(event.place), event.kind, event.address, event.value, event.place.site)
            latest.pop(key, None)
            latest[key] = event
    return list(latest.values())[-_STEPS:]


def _thread(place: Any) -> tuple[int, int, int]:
    return place.rank, place.block, place.thread
