"""all_gather over groups."""

from typing import Any

from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, OUTPUT, Form, Part, Steps


def all_gather(s: Steps, *, count: int, source: Part = INPUT, target: Part = OUTPUT) -> None:
    """Makes all_gather's steps: in the group, and then across groups with the chunks of whole
    groups. If groups differ in size, the leaders broadcast the result in their groups.
    """
    grouping = s.grouping
    most = max(map(len, grouping.groups))
    is_direct = grouping.is_even and grouping.is_consecutive
    whole = target if is_direct else s.temporary(len(grouping.groups) * most * count)
    own = whole.at(s.group * most * count)
    s.call(OWN_GROUP, "all_gather", source, own, count)
    s.call(ACROSS_GROUPS, "all_gather", own, whole, most * count)
    if not grouping.is_even:
        nbytes = len(grouping.groups) * most * count
        s.call(OWN_GROUP, "broadcast", whole, whole, nbytes, peer=0)
    if not is_direct:
        for first, position, run in grouping.runs(padded=most):
            s.copy(whole.at(position * count), target.at(first * count), run * count)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields."""
    return {"count": request.nbytes // request.world_size}


FORMS = (Form("all_gather_grouped", "all_gather in the group, then across groups", all_gather),)
