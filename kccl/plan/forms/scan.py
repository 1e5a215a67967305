"""scan over groups."""

from typing import Any

from ...base import dtypes
from ...base.abi import POSTING_BYTES
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Message, Steps, Take
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


def scan_in_turn(s: Steps, *, count: int, dtype: str, op: str, peer: int) -> None:
    """Makes scan's steps: each rank takes the sums of the rank before it, a piece at a time, adds
    its own elements, and posts the result for the next rank.

    In step t, rank r posts piece t - r of its sums, and takes piece t - r + 1 of rank r - 1.
    """
    wide, kind = accumulator(dtype, op), kind_of(dtype, op)
    size, last = dtypes.of(wide).itemsize, s.grouping.world_size - 1
    most = POSTING_BYTES // size
    pieces = [(first, min(most, count - first)) for first in range(0, count, most)]
    own = widened(s, INPUT, count, dtype, wide)
    # The sums of this rank and all lower ones, and those of the lower ones alone.
    sums, lower = s.temporary(count * size), s.temporary(count * size * peer)
    rows = s.temporary(2 * most * size)

    def piece(number: int) -> tuple[int, int]:
        return pieces[number] if 0 <= number < len(pieces) else (0, 0)

    def add(first: int, num: int, others: int) -> None:
        """Adds this rank's elements to `others` rows before them."""
        s.copy(own.at(first * size), rows.at(others * num * size), num * size)
        s.reduce(rows, sums.at(first * size), num, others + 1, **kind)

    for step in range(len(pieces) + last - 1):
        first, num = piece(step - s.rank)
        if s.rank == 0 and num:
            add(first, num, 0)
        posted = num * size if s.rank < last else 0
        taken_first, taken = piece(step - s.rank + 1) if s.rank else (0, 0)
        takes = [Take(s.rank - 1, 0, 0, taken * size)] if taken else []
        where: dict[str, Any] = {"source": sums.at(first * size), "target": rows}
        call: dict[str, Any] = {"dtype": dtype, "op": op, "peer": peer}
        s.post("scan", count, posted, takes, **where, **call, longest=most * size)
        if taken:
            if peer:
                s.copy(rows, lower.at(taken_first * size), taken * size)
            add(taken_first, taken, 1)
    num_rows = s.rank + 1 - peer
    if num_rows:
        finish(s, lower if peer else sums, OUTPUT, count, wide, dtype, op, num_rows)


def scan_by_messages(s: Steps, *, count: int, dtype: str, op: str, peer: int) -> None:
    """Makes scan's steps: each rank receives the sums of the rank before it, adds its own elements,
    and sends the result to the next rank.
    """
    wide, kind = accumulator(dtype, op), kind_of(dtype, op)
    row, last = count * dtypes.of(wide).itemsize, s.grouping.world_size - 1
    call: dict[str, Any] = {"dtype": dtype, "op": op, "peer": peer}
    s.post("scan", count, 0, **call, longest=0, compares_always=True)
    own = widened(s, INPUT, count, dtype, wide)
    # If nothing is rounded or divided at the end, the sums are the result.
    is_result = not peer and wide == dtype and op != "avg"
    sums, lower = OUTPUT if is_result else s.temporary(row), s.temporary(row)
    if s.rank == 0:
        s.reduce(own, sums, count, 1, **kind)
    else:
        from_lower = Message(s.rank - 1, 0, row, receives=True)
        s.exchange("scan", [from_lower], target=lower)
        s.add(lower, own, sums, count, **kind)
    if s.rank < last:
        s.exchange("scan", [Message(s.rank + 1, 0, row)], source=sums)
    num_rows = s.rank + 1 - peer
    if num_rows and not is_result:
        finish(s, lower if peer else sums, OUTPUT, count, wide, dtype, op, num_rows)


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
    Form(
        "scan_in_turn",
        "each rank adds its elements to the lower ranks' sums, and posts them for the next one",
        scan_in_turn,
        on_one_node=True,
        # A longer one has too many steps.
        most_bytes=1 << 20,
        from_bytes=0,
    ),
    Form(
        "scan_by_messages",
        "each rank adds its elements to the lower ranks' sums, and sends them to the next one",
        scan_by_messages,
        on_one_node=True,
    ),
)
