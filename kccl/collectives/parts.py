"""The argument `counts` of collectives: calls in which parts differ in length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base import arguments, arrays
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument

MOVES, REDUCES = "all_to_all_parts", "reduce_scatter_parts"
# If a rank does not know the longest part of all ranks, it plans the call as for this many bytes,
# because all ranks must choose the same plan.
_ANY_BYTES = 65536
# Counts above this would not fit the fields of a packet, whatever the type.
_MOST_ELEMENTS = 1 << 40


@dataclass(frozen=True)
class Parts:
    """The parts of a call, in bytes.

    Attributes:
        kernel: The kernel that makes the call.
        sends, receives: Length of the part for each rank, and from each rank. Parts lie one behind
            the other in memory.
        repeats: True if every rank is sent the same part, the whole input.
        longest: Length of the longest part of all ranks. In all_to_all no rank knows it, and a
            constant stands in its place.
    """

    kernel: str
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    longest: int
    repeats: bool = False

    def times(self, factor: int) -> "Parts":
        """Returns the parts for elements that are `factor` times as large."""
        return replace(
            self,
            sends=tuple(each * factor for each in self.sends),
            receives=tuple(each * factor for each in self.receives),
            longest=self.longest * factor,
        )

    def fields(self) -> dict[str, Any]:
        """Returns the fields of KcclCall that say which parts a call has."""
        return {"sends": self.sends, "receives": self.receives, "repeats": self.repeats}


def counts_of(name: str, value: Any, world_size: int) -> tuple[int, ...]:
    """Returns the caller's counts as integers, one for each rank.

    Raises:
        InvalidArgument: `value` is no sequence of world_size integers from 0 to 2**40.
    """
    try:
        given = tuple(value)
    except TypeError:
        raise InvalidArgument(
            f"{name} is {value!r}, must be a sequence of {world_size} integers, one for each rank"
        ) from None
    if len(given) != world_size:
        raise InvalidArgument(
            f"{name} has {len(given)} entries, must have {world_size}, one for each rank"
        )
    return tuple(
        arguments.between(f"{name}[{rank}]", each, 0, _MOST_ELEMENTS)
        for rank, each in enumerate(given)
    )


def check_sum(name: str, counts: Sequence[int], array: str, view: ArrayView) -> None:
    """Checks that an array has as many elements as the counts say.

    Raises:
        InvalidArgument: It has not.
    """
    if sum(counts) != view.count:
        raise InvalidArgument(
            f"{name} adds up to {sum(counts)}, {array} has {view.count} elements: must be equal"
        )


def check_own(counts: Sequence[int], rank: int, array: str, view: ArrayView) -> None:
    """Checks that an array has as many elements as the counts say of this rank.

    Raises:
        InvalidArgument: It has not.
    """
    if counts[rank] != view.count:
        raise InvalidArgument(
            f"counts[{rank}] is {counts[rank]}, {array} has {view.count} elements on rank {rank}: "
            "must be equal"
        )


def shape_of(
    array: Any, view: ArrayView, counts: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shape of a result of sum(wanted) elements.

    If all counts are whole rows of `array`, it keeps the dimensions of `array` except the first.
    Otherwise it has one dimension.
    """
    whole = arrays.shape(array, view)
    row = math.prod(whole[1:])
    is_rows = len(whole) > 0 and row > 0 and all(each % row == 0 for each in (*counts, *wanted))
    return (sum(wanted) // row, *whole[1:]) if is_rows else (sum(wanted),)


def moved(
    view: ArrayView,
    sends: Sequence[int],
    receives: Sequence[int],
    *,
    longest: int | None = None,
    repeats: bool = False,
    kernel: str = MOVES,
) -> Parts:
    """Returns the parts of a call, in bytes, from numbers of elements.

    Args:
        view: An array of the call, for its type.
        sends, receives, repeats, kernel: See Parts.
        longest: See Parts; None where a rank does not know it.
    """
    size = view.dtype.itemsize
    return Parts(
        kernel,
        tuple(each * size for each in sends),
        tuple(each * size for each in receives),
        _ANY_BYTES if longest is None else longest * size,
        repeats,
    )
