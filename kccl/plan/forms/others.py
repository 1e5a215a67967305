"""What teams send that have nothing to send in a step, but must make the step's call: see
kccl/plan/steps.py.
"""

from ...base.abi import MAX_WORLD_SIZE
from ..steps import Part, Steps


def for_others(s: Steps, count: int, element_bytes: int = 1) -> tuple[Part, int]:
    """Returns a part that nobody needs, with room for a chunk of each rank, and its KcclCall.count.

    This count differs from `count`, which the team that needs the step uses. So the ranks notice if
    their roots differ.
    """
    mine = 1 if count != 1 else 2
    return s.temporary(MAX_WORLD_SIZE * mine * element_bytes), mine
