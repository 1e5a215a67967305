"""reduce_scatter over groups."""

from typing import Any

from ...base import dtypes
from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Part, Steps
from .all_reduce import all_reduce
from .sums import accumulator, example, finish, kind_of


def reduce_scatter(
    s: Steps, *, count: int, dtype: str, op: str, source: Part = INPUT, target: Part = OUTPUT
) -> None:
    """Makes reduce_scatter's steps.

    A rank's place is its index in its group. First, in the group, the rank at each place gets the
    group's sums of the chunks of the ranks at this place in all groups. Then the ranks at one place
    of all groups sum these. So sums have the order, and the bits, of all_reduce's. If groups differ
    in size, it is an all_reduce.
    """
    wide, world_size = accumulator(dtype, op), s.grouping.world_size
    kind = kind_of(dtype, op)
    if not s.grouping.is_even:
        whole = s.temporary(world_size * count * dtypes.of(dtype).itemsize)
        whole_count = world_size * count
        all_reduce(s, count=whole_count, dtype=dtype, op=op, input=source, output=whole)
        nbytes = count * dtypes.of(dtype).itemsize
        s.copy(whole.at(s.rank * nbytes), target, nbytes)
        return
    size, groups = dtypes.of(wide).itemsize, s.grouping.groups
    chunks = s.temporary(world_size * count * size)
    ranks = [group[place] for place in range(len(groups[0])) for group in groups]
    for position, rank in enumerate(ranks):
        begin = source.at(rank * count * dtypes.of(dtype).itemsize)
        place = chunks.at(position * count * size)
        if wide != dtype:
            s.convert(begin, place, count, dtype, wide)
        else:
            s.copy(begin, place, count * size)
    block = s.temporary(len(groups) * count * size)
    s.call(OWN_GROUP, "reduce_scatter", chunks, block, len(groups) * count, **kind)
    mine = s.temporary(count * size) if wide != dtype else target
    s.call(ACROSS_GROUPS, "reduce_scatter", block, mine, count, **kind)
    finish(s, mine, target, count, wide, dtype, op)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example is a sum."""
    return example(request, request.nbytes // request.world_size)


FORMS = (
    Form(
        "reduce_scatter_grouped",
        "reduce_scatter in the group, then across groups",
        reduce_scatter,
    ),
)
