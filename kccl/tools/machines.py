"""What the predictions for recorded machines have in common: the ranks, and what is estimated."""

from collections.abc import Collection

from .. import topology
from ..base.errors import InvalidArgument


def weakest(machine: topology.Machine, used: Collection[str]) -> str:
    """Returns the kind of the least certain source that a prediction has used: "measured" if all
    its figures are, "estimated" if one is.
    """
    kinds = {each.kind for each in machine.sources if each.id in used}
    return max(kinds, key=topology.SOURCE_KINDS.index, default="")


def estimated(machine: topology.Machine, used: Collection[str]) -> list[str]:
    """Returns a sentence for each estimate among the sources that a prediction has used."""
    weak = [each for each in machine.sources if each.kind == "estimated" and each.id in used]
    return [f"Estimated: {each.text}." for each in weak]


def ranks_on(name: str, machine: topology.Machine, world_size: int | None) -> int:
    """Returns the number of ranks of a prediction, from the -n that was given or None.

    Raises:
        InvalidArgument: The machine has no GPUs, or too few for `world_size`.
    """
    gpus = topology.Graph(machine).gpus
    if not gpus:
        raise InvalidArgument(f"{name} has no GPUs, and predictions are for GPUs")
    if world_size is not None and not 1 <= world_size <= len(gpus):
        raise InvalidArgument(
            f"{name}: there are {world_size} ranks, must be 1 to {len(gpus)}: a GPU each"
        )
    return min(len(gpus), topology.MOST_PREDICTED_RANKS) if world_size is None else world_size
