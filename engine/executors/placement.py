"""Chooses how many threads a rank has. topology/placement.py says on which cores they run."""

import os
from collections.abc import Sequence

import kccl

from ..base.core import lib


def place(comm: kccl.Communicator, blocks: int | None) -> tuple[int, Sequence[int]]:
    """Shares the machine's cores among the ranks. Collective.

    A launcher may bind each process to cores of its own, and to more cores in one than in another.

    Args:
        comm: The ranks.
        blocks: Threads of each rank. None: as many as can each have a core, at least 1.

    Returns:
        The threads of each rank, the same on all; and this rank's cores, one for each thread, or
        none if there are fewer cores than threads.
    """
    mine = sorted(os.sched_getaffinity(0))
    of_ranks = comm.gather_objects(mine)
    if blocks is None:
        each = min(len(cpus) // of_ranks.count(cpus) for cpus in of_ranks)
        blocks = min(max(each, 1), int(lib.kKcclEngineMaxBlocks))
    cpus = kccl.topology.place_threads(
        kccl.topology.discover(), of_ranks, comm.rank, blocks, comm.layout
    )
    return blocks, cpus
