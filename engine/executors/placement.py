"""How many threads a rank has, and on which cores."""

import os
from collections.abc import Sequence

import kccl

from ..base.core import lib


def place(comm: kccl.Communicator, blocks: int | None) -> tuple[int, Sequence[int]]:
    """Shares the machine's cores among the ranks. Collective.

    A launcher may bind each process to cores of its own, and to more cores in one than in another.

    Args:
        comm: The ranks.
        blocks: Threads of each rank; None: as many as each can have a core of its own for, at
            least 1.

    Returns:
        The threads of each rank, the same on all; and this rank's cores, one for each thread, or
        none if there are fewer cores than threads.
    """
    mine = sorted(os.sched_getaffinity(0))
    of_ranks = comm.gather_objects(mine)
    sharing = [rank for rank, cpus in enumerate(of_ranks) if cpus == mine]
    if blocks is None:
        each = min(len(cpus) // of_ranks.count(cpus) for cpus in of_ranks)
        blocks = min(max(each, 1), int(lib.kKcclEngineMaxBlocks))
    if blocks * len(sharing) > len(mine):
        return blocks, ()
    first = sharing.index(comm.rank) * blocks
    return blocks, mine[first : first + blocks]
