"""reduce over groups."""

from typing import Any

from ...base import dtypes
from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Steps, Take
from .others import for_others
from .sums import Kind, accumulator, example, finish, kind_of, widened


def reduce(s: Steps, *, count: int, dtype: str, op: str, peer: int) -> None:
    """Makes reduce's steps: in each group, and then in the root's team across groups.

    If groups differ in size, their leaders reduce, and the leader of the root's group broadcasts
    the result in its group. Sums have the order, and the bits, of all_reduce's.
    """
    grouping = s.grouping
    group, place = grouping.place(peer)
    wide, kind = accumulator(dtype, op), kind_of(dtype, op)
    size = dtypes.of(wide).itemsize
    source = widened(s, INPUT, count, dtype, wide)
    own = s.temporary(count * size)
    # `total` also has room for what for_others() makes the teams send that need no message.
    total = s.temporary(max(count, 2) * size)
    if grouping.is_even:
        s.call(OWN_GROUP, "reduce", source, own, count, peer=place, **kind)
        is_needed = s.place == place
        part, length = (own, count) if is_needed else for_others(s, count, size)
        s.call(ACROSS_GROUPS, "reduce", part, total, length, peer=group, **kind)
    else:
        s.call(OWN_GROUP, "reduce", source, own, count, peer=0, **kind)
        s.call(ACROSS_GROUPS, "reduce", own, total, count, peer=group, **kind)
        nbytes = count * size
        part, length = (total, nbytes) if s.group == group else for_others(s, nbytes)
        s.call(OWN_GROUP, "broadcast", part, part, length, peer=0)
    if s.rank == peer:
        finish(s, total, OUTPUT, count, wide, dtype, op)


class Root(Kind):
    """Arguments of Steps.post(): also the root, a rank of the communicator, and the bytes that a
    rank posts.
    """

    peer: int
    longest: int


def reduce_posted(s: Steps, *, count: int, dtype: str, op: str, peer: int) -> None:
    """Makes reduce's step: each rank posts its array, and the root reduces them.

    It reduces each group's arrays, and then their results, so the bits are those of reduce().
    """
    size, wide, kind = dtypes.of(dtype).itemsize, accumulator(dtype, op), kind_of(dtype, op)
    call: Root = {"dtype": dtype, "op": op, "peer": peer, "longest": count * size}
    if s.rank != peer:
        s.post("reduce", count, count * size, **call)
        return
    order = s.grouping.order
    rows = s.temporary(len(order) * count * size)
    s.copy(INPUT, rows.at(order.index(peer) * count * size), count * size)
    takes = [
        Take(rank, 0, place * count * size, count * size)
        for place, rank in enumerate(order)
        if rank != peer
    ]
    s.post("reduce", count, 0, takes, target=rows, **call)
    rows = widened(s, rows, len(order) * count, dtype, wide)
    row = count * dtypes.of(wide).itemsize
    partial = s.temporary(len(s.grouping.groups) * row)
    for number, group in enumerate(s.grouping.groups):
        s.reduce(rows, partial.at(number * row), count, len(group), **kind)
        rows = rows.at(len(group) * row)
    total = s.temporary(row)
    s.reduce(partial, total, count, len(s.grouping.groups), **kind)
    finish(s, total, OUTPUT, count, wide, dtype, op)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example is a sum with root 0."""
    return example(request, request.nbytes) | {"peer": 0}


FORMS = (
    Form(
        "reduce_posted",
        "each rank leaves its array in its memory; the root takes and reduces them",
        reduce_posted,
        posts=lambda request: request.nbytes,
    ),
    Form("reduce_grouped", "reduce in each group, then across groups", reduce),
)
