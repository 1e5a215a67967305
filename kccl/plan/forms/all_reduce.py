"""all_reduce over groups."""

from functools import partial
from typing import Any

from ...base import dtypes
from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Part, Steps
from .sums import accumulator, example, finish, kind_of


def all_reduce(
    s: Steps,
    *,
    count: int,
    dtype: str,
    op: str,
    divides: bool = False,
    input: Part = INPUT,
    output: Part = OUTPUT,
) -> None:
    """Makes all_reduce's steps: in the group, then across groups. With `divides` each rank reduces
    a part of the message across groups.
    """
    wide = accumulator(dtype, op)
    size = dtypes.of(wide).itemsize
    kind = kind_of(dtype, op)
    source, target = input, output
    if wide != dtype:
        source = target = s.temporary(count * size)
        s.convert(input, source, count, dtype, wide)
    parts = len(s.grouping.groups[s.group])
    chunk = count // parts if divides else 0
    if chunk:
        own = target.at(s.place * chunk * size)
        s.call(OWN_GROUP, "reduce_scatter", source, own, chunk, **kind)
        s.call(ACROSS_GROUPS, "all_reduce", own, own, chunk, **kind)
        s.call(OWN_GROUP, "all_gather", own, target, chunk * size)
    done = chunk * parts
    if done < count:
        rest, source = target.at(done * size), source.at(done * size)
        s.call(OWN_GROUP, "all_reduce", source, rest, count - done, **kind)
        _reduce_everywhere(s, rest, count - done, kind["dtype"], kind["op"])
    finish(s, target, output, count, wide, dtype, op)


def _reduce_everywhere(s: Steps, part: Part, count: int, dtype: str, op: str) -> None:
    """Adds the steps that turn the result of the own group, in `part`, into that of all groups."""
    s.call(ACROSS_GROUPS, "all_reduce", part, part, count, dtype=dtype, op=op)
    if not s.grouping.is_even:
        nbytes = count * dtypes.of(dtype).itemsize
        s.call(OWN_GROUP, "broadcast", part, part, nbytes, peer=0)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example is a sum."""
    return example(request, request.nbytes)


FORMS = (
    Form("all_reduce_grouped_whole", "all_reduce in the group, then across groups", all_reduce),
    Form(
        "all_reduce_grouped_divided",
        "reduce_scatter in the group, all_reduce of each rank's part across groups, all_gather in "
        "the group",
        partial(all_reduce, divides=True),
        needs_even=True,
    ),
)
