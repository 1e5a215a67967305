"""gather over groups."""

from typing import Any

from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Part, Steps, Take
from .others import for_others


def gather(s: Steps, *, count: int, peer: int, source: Part = INPUT, target: Part = OUTPUT) -> None:
    """Makes gather's steps: in each group, and then in the root's team across groups.

    If groups differ in size, their leaders gather, and the leader of the root's group broadcasts
    the result in its group.
    """
    grouping = s.grouping
    group, place = grouping.place(peer)
    most = max(map(len, grouping.groups))
    own = s.temporary(most * count)
    nbytes = len(grouping.groups) * most * count
    is_direct = s.rank == peer and grouping.is_even and grouping.is_consecutive
    whole = target if is_direct else s.temporary(nbytes)
    if grouping.is_even:
        s.call(OWN_GROUP, "gather", source, own, count, peer=place)
        part, size = (own, most * count) if s.place == place else for_others(s, most * count)
        s.call(ACROSS_GROUPS, "gather", part, whole, size, peer=group)
    else:
        s.call(OWN_GROUP, "gather", source, own, count, peer=0)
        s.call(ACROSS_GROUPS, "gather", own, whole, most * count, peer=group)
        part, size = (whole, nbytes) if s.group == group else for_others(s, nbytes)
        s.call(OWN_GROUP, "broadcast", part, part, size, peer=0)
    if s.rank == peer and not is_direct:
        for first, position, run in grouping.runs(padded=most):
            s.copy(whole.at(position * count), target.at(first * count), run * count)


def gather_posted(s: Steps, *, count: int, peer: int) -> None:
    """Makes gather's step: each rank posts its array, and the root takes them."""
    if s.rank != peer:
        s.post("gather", count, count, peer=peer, longest=count)
        return
    s.copy(INPUT, OUTPUT.at(s.rank * count), count)
    others = [rank for rank in range(s.grouping.world_size) if rank != peer]
    takes = [Take(rank, 0, rank * count, count) for rank in others]
    s.post("gather", count, 0, takes, peer=peer, longest=count)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example has root 0."""
    return {"count": request.nbytes // request.world_size, "peer": 0}


FORMS = (
    Form(
        "gather_posted",
        "each rank leaves its array in its memory; the root takes it there",
        gather_posted,
        posts=lambda request: request.nbytes // request.world_size,
    ),
    Form("gather_grouped", "gather in each group, then across groups", gather),
)
