"""Tells who waits for what when waits begin to time out, and what is missing first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.abi import ffi

# The most lines of the table.
_MOST_LINES = 16


@dataclass(frozen=True)
class _Wait:
    """Threads of a block that wait in the same call, or at the same line."""

    given: Any  # the KcclSimWait
    rank: int
    block: int
    call: str  # the call's name; "": the threads wait in the user's code
    where: str  # as in "in wait(...), called at source:3"
    members: tuple[int, ...]  # the ranks of the call's communicator

    @property
    def is_signal(self) -> bool:
        return bool(self.call and self.given.is_signal)

    @property
    def line(self) -> str:
        count = self.given.num_threads
        threads = "1 thread" if count == 1 else f"{count} threads"
        return f"  rank {self.rank} block {self.block}: {threads} {self.where}"

    def peers(self, waits: Sequence["_Wait"]) -> set[int]:
        """Returns the ranks that these threads wait for; none if they cannot be known."""
        if not self.call:
            return set()
        others = set(self.members) - {self.rank}
        if not self.is_signal:
            return others - {each.rank for each in waits if each.call == self.call}
        has_peer = 0 <= self.given.peer < len(self.members)
        return {self.members[self.given.peer]} if has_peer else others


def waiting_table(
    waits: Sequence[tuple[Any, Any, Any]], members: Mapping[int, Sequence[int]]
) -> str:
    """Returns a line that names what is missing first, and then a line for each wait.

    Args:
        waits: A KcclSimWait, its Place, and the Symbols that know its lines.
        members: Address of a communicator's KcclState -> its ranks, by the machine's numbers.
    """
    if not waits:
        return ""
    known = []
    for given, place, symbols in waits:
        what = str(ffi.string(given.what).decode())
        in_call = bool(what) and place.site.startswith("csrc/include/")
        called = f"in {what}, called at {symbols.user_line(given.call_site)}"
        where = called if in_call else f"at {place.user_site}"
        if not what and place.kernel and place.is_within:
            in_call, what = True, place.kernel
            where = f"in {what}, a call of its program"
        ranks = tuple(members.get(given.state, ()))
        known.append(_Wait(given, place.rank, place.block, what if in_call else "", where, ranks))
    lines = [f"first missing: {_missing(known)}", "who waited for what:"]
    return "\n".join(lines + [wait.line for wait in known[:_MOST_LINES]])


def _missing(waits: Sequence[_Wait]) -> str:
    """Returns what is missing first: what the end of a chain waits for, or a cycle of waits."""
    path = [next((each for each in waits if each.given.is_polling), waits[0])]
    while True:
        wait = path[-1]
        before = _before(wait, waits)
        if not before:
            return _words(wait)
        # If one of these waits is in the chain already, the chain is a cycle, and nothing else is
        # missing.
        back = [each for each in before if each in path]
        if not back:
            path.append(before[0])
            continue
        cycle = path[max(path.index(each) for each in back) :]
        if all(each.is_signal for each in cycle):
            ends = " and ".join(f"rank {each.rank} {each.where}" for each in cycle)
            return f"a signal of each of these ranks, which wait for each other: {ends}"
        at = next((i for i, each in enumerate(cycle) if each.is_signal), 0)
        return _circle([*cycle[at:], *cycle[:at]])


def _circle(cycle: Sequence[_Wait]) -> str:
    """Describes a cycle of waits: each one waits for the next, and the last one for the first."""
    first, *others = cycle
    ends = []
    for wait, after in zip(others, [*others[1:], first], strict=True):
        whom = "its own block" if after.rank == wait.rank else f"rank {after.rank}"
        ends.append(f"for {whom} {wait.where}")
    if not first.is_signal:
        told = [f"rank {each.rank} waits {end}" for each, end in zip(others, ends, strict=True)]
        return f"{_words(first)}, and it cannot come: {', and '.join(told)}"
    told = [f"rank {others[0].rank}, which could send it, itself waits {ends[0]}"]
    told += [
        f"rank {each.rank} waits {end}" for each, end in zip(others[1:], ends[1:], strict=True)
    ]
    return f"{_words(first)}, because {', and '.join(told)}"


def _before(wait: _Wait, waits: Sequence[_Wait]) -> list[_Wait]:
    """Returns the waits that must end before this one can; none if this one is the cause."""
    if not wait.given.is_polling:
        # The threads wait at a barrier of their block, for its other threads.
        mine = wait.rank, wait.block
        return [each for each in waits if (each.rank, each.block) == mine and each is not wait]
    found: list[_Wait] = []
    for rank in sorted(wait.peers(waits)):
        of_rank = [each for each in waits if each.rank == rank and each.given.is_polling]
        # `rank` does not wait itself, and does not make the call either. So this wait is the cause.
        if not of_rank:
            return []
        found += of_rank
    return sorted(found, key=lambda each: not each.is_signal)


def _words(wait: _Wait) -> str:
    where = wait.where.removeprefix("in ")
    if wait.is_signal:
        call, _, line = where.partition(", called at ")
        return f"the signal of {call} on rank {wait.rank}, called at {line}, was never sent"
    if wait.call:
        return f"what {where.replace(', called at ', ' at ')} waits for"
    return f"what the loop {where} waits for"
