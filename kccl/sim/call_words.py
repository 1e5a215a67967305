"""Sentences about calls that all threads of a coop make together (csrc/sim/coops.cpp)."""

from collections.abc import Callable
from typing import Any

from ..base.abi import ffi, lib

# A function that returns the name of an address.
Name = Callable[[int], str]
_COOPS = {
    lib.kKcclSimCoopThread: "thread",
    lib.kKcclSimCoopWarp: "warp",
    lib.kKcclSimCoopBlock: "block",
    lib.kKcclSimCoopGrid: "grid",
}
# Arguments that are addresses.
_POINTERS = ("out", "in", "from")


def incomplete_call(finding: Any, place: Any, other: Any, _name: Name) -> str:
    """Says that some threads of a coop do not make a call that others are in."""
    instead = "has ended" if finding.has_ended else f"waits at {place.user_site}"
    whose = f"All threads of the {_COOPS[finding.coop]} must make this call"
    if finding.coop == lib.kKcclSimCoopThread:
        whose = "All threads of a warp must be in such a call together, because it polls together"
    return (
        f"call not made by all: {_missing(finding, place.rank, other)}; block {place.block} thread "
        f"{place.thread} {instead}. {whose}"
    )


def lack(finding: Any, place: Any, other: Any) -> str:
    """Returns a possible cause of a deadlock: threads of a coop that are not in a call. "" if there
    are none.
    """
    if finding.num_ranges == 0 or other is None:
        return ""
    return f". {_missing(finding, other.rank, other)}"


def threads_differ(finding: Any, place: Any, other: Any, _name: Name) -> str:
    """Says that threads of a coop make different calls."""
    return (
        f"threads differ: {place} calls {_text(finding.call)} at {place.user_site}, and {other} "
        f"calls {_text(finding.other_call)} at {other.user_site}. All threads of the "
        f"{_COOPS[finding.coop]} must make the same calls in the same order"
    )


def arguments_differ(finding: Any, place: Any, other: Any, name: Name) -> str:
    """Says that threads of a coop make the same call with different arguments."""
    what = _text(finding.argument)
    mine, theirs = (_value(what, value, name) for value in (finding.value, finding.other_value))
    return (
        f"arguments differ: {place} calls {_text(finding.call)} with {what} {mine} at "
        f"{place.user_site}, and {other} with {what} {theirs} at {other.user_site}. All threads "
        f"of the {_COOPS[finding.coop]} must give the same {what}"
    )


def bad_argument(finding: Any, place: Any, _other: Any, name: Name) -> str:
    """Says that a call gets an argument that it does not take."""
    what = _text(finding.argument)
    must = str(ffi.string(finding.text).decode()).replace("{}", str(finding.other_value))
    return (
        f"bad argument: {place} calls {_text(finding.call)} at {place.user_site} with {what} "
        f"{_value(what, finding.value, name)}, must be {must}"
    )


def exchange_order(finding: Any, place: Any, other: Any, _name: Name) -> str:
    """Says that a block's publish and collect do not belong together."""
    call, value, known = _text(finding.call), finding.value, finding.other_value
    where = f"{place} at {place.user_site}"
    published = "" if other is None else f" at {other.user_site}"
    if finding.mistake == lib.kKcclSimCollectsNothing:
        return (
            f"nothing to collect: {where} calls {call}, but its block has published nothing since "
            "it collected last. Every block calls publish, then collect, once each"
        )
    if finding.mistake == lib.kKcclSimPublishesTwice:
        return (
            f"published twice: {where} calls {call}, but its block has not collected the slices "
            f"that it published{published}. Every block calls publish, then collect, once each"
        )
    if finding.mistake == lib.kKcclSimOtherLength:
        return (
            f"lengths differ: {where} calls {call} for slices of {value} bytes, but its block "
            f"published {known} bytes{published}. Give publish and collect the same count"
        )
    if finding.mistake == lib.kKcclSimUnseenSlice:
        rank, block = divmod(value, known)
        return (
            f"never read by others: {where} calls {call} as the last block of its rank, and no "
            f"block there but its publisher has collected slice {value}, block {block}'s of rank "
            f"{rank}. Where a rank has two blocks or more, each slice must be collected on it by a "
            "block other than the one that published it"
        )
    return (
        f"never collected: {where} closes its GridExchange, but its block has not collected the "
        f"slices that it published{published}. Every block calls publish, then collect, once each"
    )


SENTENCES = {
    "incomplete_call": incomplete_call,
    "threads_differ": threads_differ,
    "arguments_differ": arguments_differ,
    "exchange_order": exchange_order,
    "bad_argument": bad_argument,
}


def _missing(finding: Any, rank: int, other: Any) -> str:
    """Returns the words "rank 0 block 0 threads 32 to 63 did not call put, which block 0 thread 3
    called at mine.cu:4".
    """
    ranges = [finding.ranges[index] for index in range(finding.num_ranges)]
    missing = " and ".join(
        f"block {block} {_threads([each for each in ranges if each.block == block])}"
        for block in sorted({each.block for each in ranges})
    )
    return (
        f"rank {rank} {missing} did not call {_text(finding.call)}, which block {other.block} "
        f"thread {other.thread} called at {other.user_site}"
    )


def _threads(ranges: list[Any]) -> str:
    spans = [
        f"{each.first}" if each.first == each.last else f"{each.first} to {each.last}"
        for each in ranges
    ]
    is_one = len(ranges) == 1 and ranges[0].first == ranges[0].last
    more = ", ..." if len(ranges) == lib.kKcclSimNumRanges else ""
    return f"{'thread' if is_one else 'threads'} {', '.join(spans)}{more}"


def _value(what: str, value: int, name: Name) -> str:
    if what in _POINTERS:
        return name(value)
    # Negative arguments were widened to 64 bits without a sign.
    return str(value - 2**64 if value >= 2**63 else value)


def _text(name: Any) -> str:
    return str(ffi.string(name).decode())
