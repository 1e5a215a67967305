"""Describes where the flags and buffers of an exchange lie, checks this, and predicts its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

LINE_BYTES = 128
"""Bytes of a line, which must have only one writer. GPUs move cache lines of 128 bytes. CPUs move
64 bytes, and prefetch lines in pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A word, or a slice of a buffer that is polled itself. One member writes it, others poll it.

    Attributes:
        writer: Number of the member that writes it.
        at: The memory that it lies in, as Layout.homes names it.
        offset: Bytes from the beginning of the layout's part in that memory.
        nbytes: Its length.
        pollers: Numbers of the members that poll it.
        after: Numbers of the flags that the writer waits for before it writes this one. They must
            come earlier in Layout.flags.
        is_counter: Whether the writer adds to the word, to which others add too.
    """

    writer: int
    at: str
    offset: int
    pollers: tuple[int, ...]
    nbytes: int = 4
    after: tuple[int, ...] = ()
    is_counter: bool = False

    @property
    def lines(self) -> range:
        """The numbers of the lines that it touches."""
        return range(self.offset // LINE_BYTES, -(-(self.offset + self.nbytes) // LINE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The flags of an exchange in which every member learns that every other one has arrived.

    Members are ranks, or the blocks of a GPU's kernel. A member writes its flags in their order.

    Attributes:
        name: "flat" (every member polls a flag of every other), "counters" (members add to
            counters, which all poll), "copies" (as flat, but with a copy of each flag on each die),
            "leaders" (a leader collects for its die), or "groups" (steps within and across groups).
        seats: The part of the machine in which each member runs: a die, a core, a GPU.
        homes: The memory that is near each member.
        leaders: (part, the member that leads it).
        flags: All flags.
        is_near: Whether every member must poll only the memory near it.
    """

    name: str
    seats: tuple[str, ...]
    homes: tuple[str, ...]
    flags: tuple[Flag, ...]
    leaders: tuple[tuple[str, int], ...] = ()
    is_near: bool = False


def faults(layout: Layout) -> list[str]:
    """Returns a sentence for each fault of a layout; none if it is right.

    It checks that each line has one writer or one counter, that a leader runs on the part that it
    leads, that members poll only near memory if is_near, and that every member learns of every
    other one.
    """
    return [*_shared_lines(layout), *_leaders(layout), *_far_polls(layout), *_unheard(layout)]


def _shared_lines(layout: Layout) -> Iterable[str]:
    writers: dict[tuple[str, int], Flag] = {}
    for number, flag in enumerate(layout.flags):
        for line in flag.lines:
            first = writers.setdefault((flag.at, line), flag)
            other = first.writer
            is_same = first.is_counter and flag.is_counter and first.offset == flag.offset
            if other != flag.writer and not is_same:
                yield (
                    f"members {other} and {flag.writer} write line {line} of {flag.at} (flag "
                    f"{number}): a line needs one writer"
                )


def _leaders(layout: Layout) -> Iterable[str]:
    for part, leader in layout.leaders:
        if layout.seats[leader] != part:
            yield f"member {leader} leads {part}, and runs on {layout.seats[leader]}"


def _far_polls(layout: Layout) -> Iterable[str]:
    for number, flag in enumerate(layout.flags if layout.is_near else ()):
        for poller in flag.pollers:
            if layout.homes[poller] != flag.at:
                yield (
                    f"member {poller} polls flag {number} in {flag.at}: near it is "
                    f"{layout.homes[poller]}"
                )


def _unheard(layout: Layout) -> Iterable[str]:
    """Finds members that do not learn that all others have arrived.

    A flag tells its pollers that its writer has arrived, and all members of whom the writer knew.
    """
    members = range(len(layout.seats))
    told: list[set[int]] = []
    heard = [{member} for member in members]
    for number, flag in enumerate(layout.flags):
        known = {flag.writer}
        for other in flag.after:
            if other >= number or flag.writer not in layout.flags[other].pollers:
                yield f"flag {number} waits for flag {other}, which its writer never sees before"
            else:
                known |= told[other]
        told.append(known)
        for poller in flag.pollers:
            heard[poller] |= known
    for member in members:
        missing = sorted(set(members) - heard[member])
        if missing:
            yield f"member {member} does not hear of {', '.join(map(str, missing))}"


def time_us(
    layout: Layout,
    way_us: Callable[[Flag, int], float],
    read_us: Callable[[Flag, int], float],
    share: float,
) -> float:
    """Predicts the microseconds until the last member knows that all have arrived.

    Args:
        layout: A layout without faults. All members begin at the same time.
        way_us: (flag, poller) -> microseconds from the writer's store until the poller sees it.
        read_us: (flag, poller) -> microseconds of the poller's read of one line of the flag.
        share: If a member writes or reads several lines, each further one delays it by this
            fraction of its time. With 0 all lines overlap; with 1 they follow one another.
    """
    sent: list[float] = []
    ready: dict[tuple[int, tuple[int, ...]], float] = {}
    polled: list[list[int]] = [[] for _ in layout.seats]

    def seen(member: int, numbers: Iterable[int]) -> float:
        last = longest = total = 0.0
        for number in numbers:
            flag = layout.flags[number]
            last = max(last, sent[number] + way_us(flag, member))
            read = read_us(flag, member)
            longest = max(longest, read)
            total += read * len(flag.lines)
        return last + share * (total - longest)

    for number, flag in enumerate(layout.flags):
        key = flag.writer, flag.after
        begun = ready[key] if key in ready else seen(flag.writer, flag.after)
        sent.append(begun)
        far = max((way_us(flag, poller) for poller in flag.pollers), default=0.0)
        ready[key] = begun + share * far * len(flag.lines)
        for poller in flag.pollers:
            polled[poller].append(number)
    return max(seen(member, numbers) for member, numbers in enumerate(polled))
