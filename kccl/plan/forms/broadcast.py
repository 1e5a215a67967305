"""broadcast over groups."""

from typing import Any

from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, Form, Steps, Take


def broadcast(s: Steps, *, count: int, peer: int) -> None:
    """Makes broadcast's steps: in the root's team across groups, and then in each group.

    If groups differ in size, the root's group comes first, then the leaders, then the other groups.
    """
    group, place = s.grouping.place(peer)
    nothing = s.temporary(2)

    def send(team: int, root: int, is_needed: bool) -> None:
        # Teams that need no message send a number of bytes other than the message's, so that the
        # ranks notice if their roots differ.
        part, nbytes = (INPUT, count) if is_needed else (nothing, 1 if count != 1 else 2)
        s.call(team, "broadcast", part, part, nbytes, peer=root)

    if s.grouping.is_even:
        send(ACROSS_GROUPS, group, s.place == place)
        send(OWN_GROUP, place, True)
        return
    send(OWN_GROUP, place if s.group == group else 0, s.group == group)
    send(ACROSS_GROUPS, group, True)
    send(OWN_GROUP, 0, s.group != group)


def broadcast_posted(s: Steps, *, count: int, peer: int) -> None:
    """Makes broadcast's step: the root posts its array, and the others take it."""
    is_root = s.rank == peer
    takes = [] if is_root else [Take(peer, 0, 0, count)]
    posted = count if is_root else 0
    s.post("broadcast", count, posted, takes, target=INPUT, peer=peer, longest=count)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields. The example has root 0."""
    return {"count": request.nbytes, "peer": 0}


FORMS = (
    Form(
        "broadcast_posted",
        "the root leaves its array in its memory; every rank takes it there",
        broadcast_posted,
        posts=lambda request: request.nbytes,
    ),
    Form("broadcast_grouped", "broadcast across groups, then in each group", broadcast),
)
