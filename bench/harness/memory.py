"""Checks that a bench fits into the machine's memory, before it begins."""

from __future__ import annotations

import kccl

# The number of arrays that a check needs: the input and the expected result. NumPy's intermediates
# are small pieces.
_CHECK_ARRAYS = 2


def check_memory(nbytes: int, world_size: int, *, arrays: int) -> None:
    """Checks that the arrays for messages of `nbytes` fit into memory.

    Args:
        nbytes: The longest message in bytes.
        world_size: Number of ranks.
        arrays: The number of arrays of that length on each rank, without those of the check.

    Raises:
        ValueError: They need more memory than is available.
    """
    needed = nbytes * world_size * (arrays + _CHECK_ARRAYS)
    for room in kccl.memory_room(needed):
        if (needed // world_size if room.is_of_process else needed) > room.free:
            taken = (
                f", {gigabytes(room.promised)} of it promised to windows that nobody has written"
                if room.promised >= 1 << 20
                else ""
            )
            raise ValueError(
                f"messages of {gigabytes(nbytes)} need {gigabytes(needed)} on {world_size} "
                f"rank{'s' if world_size > 1 else ''}, and {room.limit} has "
                f"{gigabytes(room.nbytes)} left{taken}: measure smaller sizes"
            )


def gigabytes(nbytes: int) -> str:
    """Returns bytes as text: "1.5 GiB", or "12 MiB" if they are less than one GiB."""
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / (1 << 30):.1f} GiB"
