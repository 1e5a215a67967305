"""Bugs planted in assembly."""

import re
from collections.abc import Callable

Edit = Callable[[str], str]
# What a run says of a wait without an end.
STUCK = r"is stuck"


def replaced(pattern: str, by: str, count: int = 0) -> Edit:
    """Lines of the kernel that match. There must be some."""

    def edit(body: str) -> str:
        changed, num = re.subn(pattern, by, body, count=count, flags=re.MULTILINE)
        assert num > 0, f"the compiler writes no {pattern}: change the mutation"
        return changed

    return edit
