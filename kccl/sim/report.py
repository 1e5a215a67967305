"""Reports of the simulator's findings: who did what, at which line, and how to replay it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..base.abi import KERNELS, lib, members
from ..base.errors import ProtocolError
from .call_words import SENTENCES, lack, waiting_table
from .regions import Regions
from .symbols import Symbols

# Kind of finding -> its text. _sentence() fills the fields in, and appends call, step and seed.
_KINDS = {
    "deadlock": "deadlock: {num_waiting} threads wait and nothing can change any more: {waiting}"
    "{lack}",
    "divergence": "divergence: {place} waits at {user_site}{within}, and {other} {does_other}. All "
    "threads of a block or warp must come to the same barriers and calls",
    "data_race": "data race: {place} at {site} {does} {what}, {other} {did} it, and no "
    "synchronisation orders them",
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
    "invalid_access": "invalid access: {place} at {site} accesses {what}, which no GPU can",
    "interrupted": "interrupted: {place} was at {site}",
    "undrained": "copy not drained: {place} at {site} starts a copy to {what}, and its block ends "
    "before the copy is there",
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

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.symbols = Symbols()
        self._kinds = {
            value: name for name, value in members("KcclSimFindingKind", "kKcclSim").items()
        }
        self._kernels = {value: name for name, value in KERNELS.items()}
        self._events = {
            value: name for name, value in members("KcclSimEventKind", "kKcclSim").items()
        }
        self._orders = list(members("KcclSimOrder", "kKcclSimOrder"))
        self._scopes = list(members("KcclSimScope", "kKcclSimScope"))

    def error(self, finding: Any, events: Sequence[Any]) -> ProtocolError:
        """The exception for a KcclSimFinding.

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
        what = self.regions.name(finding.address)
        message = _sentence(kind, finding, place, other, what, waiting)
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

    def _seen_at(self, finding: Any) -> Any:
        """The place of a finding. Of a loop that has no step: a place with a line of the user's."""
        if not finding.is_hung:
            return finding.place
        seen = (finding.waiting[index] for index in range(finding.num_named))
        return next((each for each in seen if self.symbols.is_of_user(each.site)), finding.place)

    def waits(self, waits: Sequence[Any]) -> str:
        """Who waits for what (KcclSimWaits, the first missing event first); "" for nobody."""
        self.symbols.look_up(site for each in waits for site in (each.place.site, each.call_site))
        return waiting_table([(each, self.place(each.place), self.symbols) for each in waits])

    def place(self, place: Any) -> Place:
        """The Place for a KcclSimPlace."""
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
        """The code address that leads to the user's line: where the call was made, in the library.

        Compilers do not inline all of the library.
        """
        is_lost = self.symbols.is_of_library(place.site) and not self.symbols.is_of_user(place.site)
        return int(place.call_site if is_lost and place.call_site else place.site)

    def _line(self, place: Any) -> str:
        line, of_call = self.symbols.line(place.site), self._user_site(place)
        if of_call == place.site or place.site == 0 or not self.symbols.is_of_user(of_call):
            return line
        return f"{line}, called in {self.symbols.user_line(of_call)}"

    def timeline(self, events: Sequence[Any]) -> str:
        """KcclSimEvents as text, one in each line."""
        self.symbols.look_up(event.place.site for event in events)
        return "\n".join(
            f"  {event.step:8} {self.place(event.place)!s:27} {self.event(event)} "
            f"at {self.symbols.line(event.place.site)}"
            for event in events
        )

    def event(self, event: Any) -> str:
        """A KcclSimEvent as text: operation, address, value, order."""
        name = self._events[event.kind].replace("_", " ")
        address = f" {self.regions.name(event.address)}" if event.kind in _WITH_ADDRESS else ""
        value = f" = {event.value:#x}" if event.kind in _WITH_VALUE else ""
        order = ""
        if event.kind in _WITH_ORDER:
            order = f", {self._orders[event.order]}, {self._scopes[event.scope]} scope"
        age = f", {event.age} stores old" if event.age else ""
        return f"{name}{address}{value}{order}{age}"


_WITH_VALUE = (lib.kKcclSimLoad, lib.kKcclSimStore)
_WITH_ORDER = (*_WITH_VALUE, lib.kKcclSimFence)
_WITH_ADDRESS = (
    *(*_WITH_VALUE, lib.kKcclSimRead, lib.kKcclSimWrite),
    *(lib.kKcclSimCopyStarts, lib.kKcclSimCopyEnds),
)


def _sentence(
    kind: str, finding: Any, place: Place, other: Place | None, what: str, waiting: str
) -> str:
    if kind in SENTENCES:
        text = SENTENCES[kind](finding, place, other)
        return f"{text}; step {finding.step} of seed {finding.seed}, which replays it"
    text = _KINDS["hung" if finding.is_hung else kind].format(
        place=place,
        user_site=place.user_site,
        within="" if place.site.startswith(place.user_site) else f" (in {place.site})",
        does_other=_does_other(finding, other),
        lack=lack(finding, place, other) if kind == "deadlock" else "",
        site=place.site,
        does=_VERBS.get(finding.deed, ("",))[0],
        other=_other(kind, other),
        did=_VERBS.get(finding.other_deed, ("", ""))[1],
        what=what,
        num_waiting=finding.num_waiting,
        waiting=waiting,
        step=finding.step,
    )
    calls = [
        f"{'in' if who.is_within else 'after'} {who.kernel} on channel {who.channel}, "
        f"epoch {who.epoch}{whose}"
        for who, whose in ((place, ""), (other, " (the other)"))
        if who is not None and who.kernel
    ]
    within = f"; {' and '.join(calls)}" if calls else ""
    return f"{text}{within}; step {finding.step} of seed {finding.seed}, which replays it"


def _other(kind: str, other: Place | None) -> str:
    if other is None:
        return "another thread"
    return str(other) if kind == "divergence" else f"{other} at {other.site}"


def _does_other(finding: Any, other: Place | None) -> str:
    if finding.has_ended:
        return "has ended"
    return f"waits at {'an unknown line' if other is None else other.user_site}"


def _relevant(finding: Any, events: Sequence[Any]) -> list[Any]:
    """The last steps of the threads in a finding, and the last stores to words that they accessed.

    Of steps that a thread repeats, as polls, only the last one is kept.
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
