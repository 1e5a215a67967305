"""barrier over groups."""

from typing import Any

from ..grouping import ACROSS_GROUPS, OWN_GROUP
from ..spec import Request
from ..steps import INPUT, Form, Steps


def barrier(s: Steps) -> None:
    """Makes barrier's steps: in the group, and then across groups. If groups differ in size, only
    their leaders meet across groups, so another barrier in the group follows.
    """
    s.call(OWN_GROUP, "barrier", INPUT, INPUT, 0)
    s.call(ACROSS_GROUPS, "barrier", INPUT, INPUT, 0)
    if not s.grouping.is_even:
        s.call(OWN_GROUP, "barrier", INPUT, INPUT, 0)


def fields(request: Request) -> dict[str, Any]:
    """See steps.Fields."""
    return {}


FORMS = (Form("barrier_grouped", "barrier in the group, then across groups", barrier),)
