"""Divides a call on arrays of a GPU into pieces, which are made on the host one after another
(csrc/host/staged.inc). Needs no device.

A collective treats all elements alike. So its call on `count` elements is the same as calls on
parts of them, with the same bits, if all ranks divide the elements alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import dtypes
from ..base.errors import InvalidArgument

MOST_BYTES = 1 << 18
"""Most bytes of a piece's input or output. The GPU copies one piece while the ranks exchange
another, so pieces are shorter than long messages; each costs its exchange's latency.
"""
_ALIGNMENT = 256


@dataclass(frozen=True)
class Row:
    """Bytes that are copied between an array of a call and the memory of a piece on the host.

    Attributes:
        offset, place: Where they begin in the array, and in that memory.
        num_bytes: How many they are.
    """

    offset: int
    place: int
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    """A part of a call.

    Attributes:
        count: KcclCall.count of the piece.
        reads, writes: What this rank's piece needs of the input, and gives to the output.
        input_bytes, output_bytes: Length of its memory on the host.
        is_in_place: True if input and output must be the same memory.
    """

    count: int
    reads: tuple[Row, ...]
    writes: tuple[Row, ...]
    input_bytes: int
    output_bytes: int
    is_in_place: bool = False


@dataclass(frozen=True)
class _Arrays:
    """How many chunks of a call's count the two arrays have, and who reads and writes them.

    Attributes:
        inputs, outputs: True: a chunk for each rank; False: one.
        reader, writer: "all", "root" or "none".
        is_in_place: True if the collective has one array only.
    """

    inputs: bool = False
    outputs: bool = False
    reader: str = "all"
    writer: str = "all"
    is_in_place: bool = False


_OF_COLLECTIVE: Mapping[str, _Arrays] = {
    "barrier": _Arrays(reader="none", writer="none"),
    "all_reduce": _Arrays(),
    "reduce": _Arrays(writer="root"),
    "scan": _Arrays(),
    "broadcast": _Arrays(reader="root", is_in_place=True),
    "all_gather": _Arrays(outputs=True),
    "reduce_scatter": _Arrays(inputs=True),
    "all_to_all": _Arrays(inputs=True, outputs=True),
    "gather": _Arrays(outputs=True, writer="root"),
    "scatter": _Arrays(inputs=True, reader="root"),
}


def pieces(
    collective: str, world_size: int, rank: int, fields: Mapping[str, Any], most: int = MOST_BYTES
) -> list[Piece]:
    """Returns the pieces of a call, which are as many on all ranks.

    Args:
        collective: The collective.
        world_size, rank: The number of ranks, and this one.
        fields: The fields of KcclCall; `sends` and `receives` if the parts of the call differ.
        most: Most bytes of a piece.

    Raises:
        InvalidArgument: Calls of this collective cannot be divided.
    """
    known = _OF_COLLECTIVE.get(collective)
    if known is None:
        raise InvalidArgument(
            f"collective is {collective!r}, must be one of {', '.join(_OF_COLLECTIVE)} where "
            "arrays are on GPUs and the ranks on several nodes"
        )
    root = fields.get("peer", 0)
    who = {"all": True, "root": rank == root, "none": False}
    reads, writes = who[known.reader], who[known.writer]
    if collective == "scan" and root and rank == 0:
        # An exclusive scan writes nothing on rank 0. `peer` says that it is exclusive.
        writes = False
    if "sends" in fields:
        return [_of_parts(known, rank, root, fields, reads=reads, writes=writes)]
    # Elements have a type where they are reduced; what is only moved is counted in bytes.
    unit = dtypes.of(fields["dtype"]).itemsize if "op" in fields else 1
    count = fields.get("count", 0)
    inputs, outputs = (world_size if each else 1 for each in (known.inputs, known.outputs))
    row = most // max(inputs, outputs) // _ALIGNMENT * _ALIGNMENT
    step = max(row // unit, 1)
    made = []
    for first in range(0, max(count, 1), step):
        n = min(step, count - first)
        sizes = [rows * n * unit * used for rows, used in ((inputs, reads), (outputs, writes))]
        both = [
            _rows(rows * used, count * unit, first * unit, n * unit)
            for rows, used in ((inputs, reads), (outputs, writes))
        ]
        made.append(Piece(n, both[0], both[1], sizes[0], sizes[1], known.is_in_place))
    return made


def _rows(rows: int, stride: int, begin: int, num_bytes: int) -> tuple[Row, ...]:
    if num_bytes == 0:
        return ()
    return tuple(Row(i * stride + begin, i * num_bytes, num_bytes) for i in range(rows))


def _of_parts(
    known: _Arrays, rank: int, root: int, fields: Mapping[str, Any], *, reads: bool, writes: bool
) -> Piece:
    """Returns the one piece of a call whose parts differ in length: all of it."""
    sends, receives = fields["sends"], fields["receives"]
    if known.inputs and known.outputs:
        lengths = sum(sends), sum(receives)
    elif known.outputs:
        # A rank of an all_gather sends the same part to all, a rank of a gather to the root.
        own = receives[rank] if known.writer == "all" else sends[root]
        lengths = own, sum(receives)
    else:
        own = sends[rank] if known.reader == "all" else receives[root]
        lengths = sum(sends), own
    num_in, num_out = lengths[0] * reads, lengths[1] * writes
    return Piece(fields.get("count", 0), _whole(num_in), _whole(num_out), num_in, num_out)


def _whole(num_bytes: int) -> tuple[Row, ...]:
    return (Row(0, 0, num_bytes),) if num_bytes else ()


def longest(made: Sequence[Piece]) -> int:
    """Returns the bytes of the longest input or output of pieces."""
    return max(max(each.input_bytes, each.output_bytes) for each in made)
