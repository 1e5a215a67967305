"""The messages of teams that have nothing to send in a step; see kccl/plan/steps.py."""

from ...base.abi import MAX_WORLD_SIZE
from ..steps import Part, Steps


def for_others(s: Steps, count: int, element_bytes: int = 1) -> tuple[Part, int]:
    """Returns a part that nobody needs, and KcclCall.count of it, with room for a chunk of each
    rank.

    Another count than `count`, that of the team that needs the step. So differing roots are
    noticed.
    """
    mine = 1 if count != 1 else 2
    return s.temporary(MAX_WORLD_SIZE * mine * element_bytes), mine
