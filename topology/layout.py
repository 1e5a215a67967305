"""Where the flags and buffers of an exchange lie, and what is wrong or slow about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

LINE_BYTES = 128
"""Bytes of a line that must have one writer. GPUs move 128; CPUs move 64, and fetch pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A word, or a slice of a buffer that is its own flag: one member writes it, others poll it.

    Attributes:
        writer: Number of the member that writes it.
        at: The memory that it lies in, as Layout.homes names it.
        offset: Bytes from the beginning of that memory's part of the layout.
        nbytes: Its length.
        pollers: Numbers of the members that poll it.
        after: Numbers of the flags that the writer has seen before it writes this one. They come
            earlier in Layout.flags.
    """

    writer: int
    at: str
    offset: int
    pollers: tuple[int, ...]
    nbytes: int = 4
    after: tuple[int, ...] = ()

    @property
    def lines(self) -> range:
        """Numbers of the lines that it touches."""
        return range(self.offset // LINE_BYTES, -(-(self.offset + self.nbytes) // LINE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The flags of an exchange in which every member hears of every other one.

    Members are ranks, or the blocks of a GPU's kernel. A member writes its flags in their order.

    Attributes:
        name: How they meet: "flat" (everybody polls everybody), "copies" (the same, with a copy of
            each flag on each die), "leaders" (a leader collects for its die), "groups".
        seats: The part of the machine in which each member runs: a die, a core, a GPU.
        homes: The memory that is near each member.
        leaders: (part, member that leads it).
        flags: All flags.
        is_near: Every member polls the memory near it, and no other.
    """

    name: str
    seats: tuple[str, ...]
    homes: tuple[str, ...]
    flags: tuple[Flag, ...]
    leaders: tuple[tuple[str, int], ...] = ()
    is_near: bool = False


def faults(layout: Layout) -> list[str]:
    """Return what makes a layout wrong or slow, one sentence each; none if all is well.

    Lines have one writer each, a leader runs on the part that it leads, members poll near memory
    where the layout says so, and every member hears of every other one.
    """
    return [*_shared_lines(layout), *_leaders(layout), *_far_polls(layout), *_unheard(layout)]


def _shared_lines(layout: Layout) -> Iterable[str]:
    writers: dict[tuple[str, int], int] = {}
    for number, flag in enumerate(layout.flags):
        for line in flag.lines:
            other = writers.setdefault((flag.at, line), flag.writer)
            if other != flag.writer:
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
    """Follows what each flag tells: that its writer, and all that it has heard of, have arrived."""
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
    """Predict when the last member has heard of all, in microseconds after all have begun.

    Args:
        layout: A layout without faults.
        way_us: (flag, poller) -> microseconds from the writer's store to the poller's sight of it.
        read_us: (flag, poller) -> microseconds of a read of one of its lines.
        share: By which part of that time each further line delays a member that writes or reads
            several. With 0 they overlap; with 1 they come one after another.
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
