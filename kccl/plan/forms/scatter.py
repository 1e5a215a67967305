"""scatter over groups."""

from typing import Any

from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Message, Part, Steps, Take
from .others import for_others


def scatter(
    s: Steps, *, count: int, peer: int, source: Part = INPUT, target: Part = OUTPUT
) -> None:
    """Makes scatter's steps: in the root's team across groups, and then in each group.

    If groups differ in size, the root broadcasts its array in its group, and the leaders scatter.
    """
    grouping = s.grouping
    group, place = grouping.place(peer)
    most = max(map(len, grouping.groups))
    own = s.temporary(most * count)
    nbytes = len(grouping.groups) * most * count
    is_direct = s.rank == peer and grouping.is_even and grouping.is_consecutive
    whole = source if is_direct else s.temporary(nbytes)
    if s.rank == peer and not is_direct:
        for first, position, run in grouping.runs(padded=most):
            s.copy(source.at(first * count), whole.at(position * count), run * count)
    if grouping.is_even:
        is_needed = s.place == place
        part, size = (own, most * count) if is_needed else for_others(s, most * count)
        s.call(ACROSS_GROUPS, "scatter", whole, part, size, peer=group)
        s.call(OWN_GROUP, "scatter", own, target, count, peer=place)
        return
    part, size = (whole, nbytes) if s.group == group else for_others(s, nbytes)
    s.call(OWN_GROUP, "broadcast", part, part, size, peer=place if s.group == group else 0)
    s.call(ACROSS_GROUPS, "scatter", whole, own, most * count, peer=group)
    s.call(OWN_GROUP, "scatter", own, target, count, peer=0)


def scatter_posted(s: Steps, *, count: int, peer: int) -> None:
    """Makes scatter's step: the root posts its array, and each rank takes its chunk."""
    own, whole = s.rank * count, s.grouping.world_size * count
    if s.rank != peer:
        s.post("scatter", count, 0, [Take(peer, own, 0, count)], peer=peer, longest=whole)
        return
    s.post("scatter", count, whole, peer=peer, longest=whole)
    s.copy(INPUT.at(own), OUTPUT, count)


def scatter_by_messages(s: Steps, *, count: int, peer: int) -> None:
    """Makes scatter's steps: the root sends each rank its chunk."""
    s.post("scatter", count, 0, peer=peer, longest=0, compares_always=True)
    if s.rank != peer:
        s.exchange("scatter", [Message(peer, 0, count, receives=True)])
        return
    # Not all roots begin with the same rank.
    others = [*range(peer + 1, s.grouping.world_size), *range(peer)]
    s.exchange("scatter", [Message(rank, rank * count, count) for rank in others])
    s.copy(INPUT.at(peer * count), OUTPUT, count)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example has root 0."""
    return {"count": request.nbytes // request.world_size, "peer": 0}


FORMS = (
    Form(
        "scatter_posted",
        "the root leaves its array in its memory; each rank takes its chunk there",
        scatter_posted,
        posts=lambda request: request.nbytes,
    ),
    Form("scatter_grouped", "scatter across groups, then in each group", scatter),
    # A byte is copied twice, and three times or more by the steps of groups.
    Form(
        "scatter_by_messages",
        "the root sends each rank its chunk",
        scatter_by_messages,
        on_one_node=True,
    ),
)
