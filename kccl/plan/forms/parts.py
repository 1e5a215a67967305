"""Makes calls in which ranks' parts differ in length (the argument `counts`) over groups. Every
part is padded to the length of the longest.

So a call has the steps of the collective's form for equal parts, and copies before and after them.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from ...base import dtypes
from ..steps import INPUT, OUTPUT, Part, Steps
from .all_gather import all_gather
from .gather import gather
from .reduce_scatter import reduce_scatter
from .scatter import scatter


def _copies(
    s: Steps, lengths: Sequence[int], longest: int, padded: Part, packed: Part, *, packs: bool
) -> None:
    """Copies every part from the padded array to the packed one; with `packs` False, back."""
    begin = 0
    for rank, length in enumerate(lengths):
        ends = padded.at(rank * longest), packed.at(begin)
        if length:
            s.copy(*(ends if packs else ends[::-1]), length)
        begin += length


def _mark(lengths: Sequence[int]) -> int:
    """Returns a check sum, from 1 to 255, of lengths that all ranks know."""
    return zlib.crc32(repr(tuple(lengths)).encode()) % 255 + 1


def _all_gather(s: Steps, *, count: int, receives: Sequence[int], **_: Any) -> None:
    s.mark = _mark(receives)
    own, whole = s.temporary(count), s.temporary(len(receives) * count)
    s.copy(INPUT, own, receives[s.rank])
    all_gather(s, count=count, source=own, target=whole)
    _copies(s, receives, count, whole, OUTPUT, packs=True)


def _gather(
    s: Steps, *, count: int, sends: Sequence[int], receives: Sequence[int], peer: int, **_: Any
) -> None:
    own, whole = s.temporary(count), s.temporary(len(sends) * count)
    s.copy(INPUT, own, sends[peer])
    gather(s, count=count, peer=peer, source=own, target=whole)
    if s.rank == peer:
        _copies(s, receives, count, whole, OUTPUT, packs=True)


def _scatter(
    s: Steps, *, count: int, sends: Sequence[int], receives: Sequence[int], peer: int, **_: Any
) -> None:
    own, whole = s.temporary(count), s.temporary(len(sends) * count)
    if s.rank == peer:
        _copies(s, sends, count, whole, INPUT, packs=False)
    scatter(s, count=count, peer=peer, source=whole, target=own)
    s.copy(own, OUTPUT, receives[peer])


def _reduce_scatter(
    s: Steps, *, count: int, sends: Sequence[int], dtype: str, op: str, **_: Any
) -> None:
    s.mark = _mark(sends)
    own, whole = s.temporary(count), s.temporary(len(sends) * count)
    _copies(s, sends, count, whole, INPUT, packs=False)
    elements = count // dtypes.of(dtype).itemsize
    reduce_scatter(s, count=elements, dtype=dtype, op=op, source=whole, target=own)
    s.copy(own, OUTPUT, sends[s.rank])


OF_PARTS: dict[str, Callable[..., None]] = {
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
}
"""How the steps are made, by collective. They take the fields of KcclCall; `count` is the longest
part in bytes. all_to_all is missing, because in it no rank knows the longest part of all: its parts
are messages (grouped.PlanOfMessages).
"""
