"""all_to_all over groups."""

from typing import Any

from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Part, Steps


def all_to_all(s: Steps, *, count: int) -> None:
    """Makes all_to_all's steps.

    A rank's place is its index in its group. First, in the group, the rank at each place gets all
    chunks for the ranks at this place in all groups. Then the ranks at one place of all groups
    exchange these. If groups differ in size, their leaders gather the groups' arrays, exchange
    chunks, and scatter them.
    """
    if s.grouping.is_even:
        _by_place(s, count)
    else:
        _by_leaders(s, count)


def _by_place(s: Steps, count: int) -> None:
    groups = s.grouping.groups
    size, world_size = len(groups[0]), s.grouping.world_size
    for_places, from_group, for_groups, whole = (s.temporary(world_size * count) for _ in range(4))
    # for_places[place][group]: chunks that the rank at this place of the own group passes on.
    for place in range(size):
        for number, group in enumerate(groups):
            at = (place * len(groups) + number) * count
            s.copy(INPUT.at(group[place] * count), for_places.at(at), count)
    s.call(OWN_GROUP, "all_to_all", for_places, from_group, len(groups) * count)
    # for_groups[group][place]: the chunk for that group from the rank at this place of the own one.
    for place in range(size):
        for number in range(len(groups)):
            begin, at = place * len(groups) + number, number * size + place
            s.copy(from_group.at(begin * count), for_groups.at(at * count), count)
    s.call(ACROSS_GROUPS, "all_to_all", for_groups, whole, size * count)
    for first, position, run in s.grouping.runs(padded=size):
        s.copy(whole.at(position * count), OUTPUT.at(first * count), run * count)


def _by_leaders(s: Steps, count: int) -> None:
    groups, world_size = s.grouping.groups, s.grouping.world_size
    most = max(map(len, groups))
    each = most * most * count
    rows = s.temporary(most * world_size * count)
    sent, came = s.temporary(len(groups) * each), s.temporary(len(groups) * each)
    is_leader = s.place == 0
    mine = groups[s.group]

    def at(place: int, rank: int) -> Part:
        """Returns the chunk that the member at `place` has for `rank`, or gets from it."""
        return rows.at((place * world_size + rank) * count)

    def in_block(part: Part, group: int, receiver: int, source: int) -> Part:
        """Returns the chunk from place `source` for place `receiver`, to or from `group`."""
        return part.at(group * each + (receiver * most + source) * count)

    s.call(OWN_GROUP, "gather", INPUT, rows, world_size * count, peer=0)
    for number, group in enumerate(groups if is_leader else ()):
        for receiver, rank in enumerate(group):
            for source in range(len(mine)):
                s.copy(at(source, rank), in_block(sent, number, receiver, source), count)
    s.call(ACROSS_GROUPS, "all_to_all", sent, came, each)
    for number, group in enumerate(groups if is_leader else ()):
        for receiver in range(len(mine)):
            for source, rank in enumerate(group):
                s.copy(in_block(came, number, receiver, source), at(receiver, rank), count)
    s.call(OWN_GROUP, "scatter", rows, OUTPUT, world_size * count, peer=0)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields."""
    return {"count": request.nbytes // request.world_size}


def _no_steps(s: Steps, *, count: int) -> None:
    """Adds nothing: the chunks are messages."""


FORMS = (
    Form("all_to_all_grouped", "all_to_all in the group, then across groups", all_to_all),
    # A byte is copied twice or less on its way, and some seven times by the steps of groups.
    Form(
        "all_to_all_by_messages",
        "each chunk is a message to its rank",
        _no_steps,
        on_one_node=True,
        by_messages=True,
    ),
)
