"""What the simulator found, in words: who did what, where, and how to see it again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..abi import KERNELS, lib, members
from ..errors import ProtocolError
from .regions import Regions
from .symbols import Symbols

# Kind -> what is wrong. {place} and {other} do {access}; the clauses of _sentence follow.
_KINDS = {
    "deadlock": "deadlock: {num_waiting} threads wait and nothing can change any more; one is "
    "{place} at {site}",
    "divergence": "divergence: {place} at {site} and {other} wait at different barriers",
    "data_race": "data race: {place} at {site} and {other} both access {what}, at least one writes "
    "it, and no synchronisation orders them",
    "narrow_scope": "scope too narrow: {place} at {site} accesses {what} with a scope that leaves "
    "out {other}",
    "two_writers": "two writers: {place} at {site} and {other} both write {what}, in no order",
    "reused_slot": "slot reused: {place} at {site} writes {what}, where {other} may still read "
    "what was there before",
    "stale_word": "stale word: {place} at {site} takes {what} for this call's, and it is {other}'s",
    "late_timeout": "late time-out: {place} at {site} waits on past its limit",
    "endless": "endless: after {step} steps the kernels have not ended; {place} is at {site}",
    "invalid_access": "invalid access: {place} at {site} accesses {what}, which no GPU can",
}
# How many of the last steps a report tells.
_STEPS = 16


@dataclass(frozen=True)
class Place:
    """A thread of the machine, and what it does.

    Attributes:
        rank, block, thread: Which thread; a block of -1 is the rank's host.
        site: Line of source.
        kernel, channel, epoch: The library's call; "", -1 and 0 without one.
    """

    rank: int
    block: int
    thread: int
    site: str
    kernel: str
    channel: int
    epoch: int

    def __str__(self) -> str:
        if self.block < 0:
            return f"the host of rank {self.rank}"
        return f"rank {self.rank} block {self.block} thread {self.thread}"


class Reporter:
    """Turns the machine's numbers into words."""

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

    def error(self, finding: Any, events: Sequence[Any]) -> ProtocolError:
        """The exception for a KcclSimFinding.

        Args:
            finding: The finding.
            events: KcclSimEvents up to it, oldest first.
        """
        kind = self._kinds[finding.kind]
        self.symbols.look_up([finding.place.site, finding.other.site])
        place = self.place(finding.place)
        other = self.place(finding.other) if finding.other.rank >= 0 else None
        timeline = self.timeline(_relevant(finding, events))
        message = _sentence(kind, finding, place, other, self.regions.name(finding.address))
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

    def place(self, place: Any) -> Place:
        """A KcclSimPlace in words."""
        is_call = place.channel >= 0
        return Place(
            place.rank,
            place.block,
            place.thread,
            self.symbols.place(place.site),
            self._kernels.get(place.kernel, "a user's call") if is_call else "",
            place.channel,
            place.epoch if is_call else 0,
        )

    def timeline(self, events: Sequence[Any]) -> str:
        """KcclSimEvents, one a line."""
        self.symbols.look_up(event.place.site for event in events)
        return "\n".join(
            f"  {event.step:8} {self.place(event.place)!s:27} {self.event(event)} "
            f"at {self.symbols.place(event.place.site)}"
            for event in events
        )

    def event(self, event: Any) -> str:
        """What a KcclSimEvent does."""
        name = self._events[event.kind].replace("_", " ")
        if event.kind not in _WITH_ADDRESS:
            return name
        value = f" = {event.value:#x}" if event.kind in _WITH_VALUE else ""
        age = f", {event.age} stores old" if event.age else ""
        return f"{name} {self.regions.name(event.address)}{value}{age}"


_WITH_VALUE = (lib.kKcclSimLoad, lib.kKcclSimStore)
_WITH_ADDRESS = (*_WITH_VALUE, lib.kKcclSimCopyStarts, lib.kKcclSimCopyEnds)


def _sentence(kind: str, finding: Any, place: Place, other: Place | None, what: str) -> str:
    text = _KINDS[kind].format(
        place=place,
        site=place.site,
        other="another thread" if other is None else f"{other} at {other.site}",
        what=what,
        num_waiting=finding.num_waiting,
        step=finding.step,
    )
    calls = [
        f"{who.kernel} on channel {who.channel}, epoch {who.epoch}{whose}"
        for who, whose in ((place, ""), (other, " (the other)"))
        if who is not None and who.kernel
    ]
    within = f"; in {' and '.join(dict.fromkeys(calls))}" if calls else ""
    return f"{text}{within}; step {finding.step} of seed {finding.seed}, which replays it"


def _relevant(finding: Any, events: Sequence[Any]) -> list[Any]:
    """The last steps of the threads that a finding names, and the stores to what they looked at.

    Of what a thread does again and again, as polls, the last time.
    """
    threads = {_thread(who) for who in (finding.place, finding.other)}
    words = {finding.address // 8}
    words |= {event.address // 8 for event in events if _thread(event.place) in threads}
    told: dict[tuple[Any, ...], Any] = {}
    for event in events:
        is_store = event.kind == lib.kKcclSimStore and event.address // 8 in words
        if _thread(event.place) in threads or is_store:
            key = (*_thread(event.place), event.kind, event.address, event.value, event.place.site)
            told.pop(key, None)
            told[key] = event
    return list(told.values())[-_STEPS:]


def _thread(place: Any) -> tuple[int, int, int]:
    return place.rank, place.block, place.thread
