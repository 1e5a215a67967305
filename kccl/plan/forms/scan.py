"""scan over groups."""

from typing import Any

from ...base import dtypes
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Steps, Take
from .all_gather import all_gather
from .sums import accumulator, example, finish, kind_of, widened


def scan(s: Steps, *, count: int, dtype: str, op: str, peer: int) -> None:
    """Makes scan's steps: an all_gather over groups; then each rank reduces the rows of lower ranks
    and its own.

    So rows are reduced in rank order, as with at most 8 ranks, whatever ranks a group has. `peer`
    is 1 for an exclusive scan.
    """
    wide, kind = accumulator(dtype, op), kind_of(dtype, op)
    row = count * dtypes.of(wide).itemsize
    source = widened(s, INPUT, count, dtype, wide)
    rows = s.temporary(s.grouping.world_size * row)
    all_gather(s, count=row, source=source, target=rows)
    num_rows = s.rank + 1 - peer
    if num_rows == 0:
        return
    result = s.temporary(row)
    s.reduce(rows, result, count, num_rows, **kind)
    finish(s, result, OUTPUT, count, wide, dtype, op, num_rows)


def scan_posted(s: Steps, *, count: int, dtype: str, op: str, peer: int) -> None:
    """Makes scan's step: each rank posts its array, takes those of lower ranks and reduces them."""
    size, wide, kind = dtypes.of(dtype).itemsize, accumulator(dtype, op), kind_of(dtype, op)
    num_rows, row = s.rank + 1 - peer, count * size
    rows = s.temporary(max(num_rows, 1) * row)
    if not peer:
        s.copy(INPUT, rows.at(s.rank * row), row)
    # The last rank posts nothing, because no rank is above it.
    posted = row if s.rank + 1 < s.grouping.world_size else 0
    takes = [Take(rank, 0, rank * row, row) for rank in range(s.rank)]
    s.post("scan", count, posted, takes, target=rows, longest=row, dtype=dtype, op=op, peer=peer)
    if num_rows == 0:
        return
    result = s.temporary(count * dtypes.of(wide).itemsize)
    s.reduce(widened(s, rows, num_rows * count, dtype, wide), result, count, num_rows, **kind)
    finish(s, result, OUTPUT, count, wide, dtype, op, num_rows)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example is a sum that is not exclusive."""
    return example(request, request.nbytes) | {"peer": 0}


FORMS = (
    Form(
        "scan_posted",
        "each rank leaves its array in its memory; each takes the lower ranks' and reduces them",
        scan_posted,
        posts=lambda request: request.nbytes,
    ),
    Form("scan_grouped", "all_gather over groups; each reduces the rows it needs", scan),
)
