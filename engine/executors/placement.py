"""Chooses how many threads a rank has. topology/placement.py says on which cores they run."""

import os
from collections.abc import Sequence

import kccl

from ..base.core import lib


def place(comm: kccl.Communicator, blocks: int | None) -> tuple[int, Sequence[int]]:
    """Chooses the number of threads of each rank and the cores of this rank's. Collective: all
    ranks must call it.

    A launcher may have bound the processes to different cores, and to different numbers of them. So
    the ranks tell each other their cores.

    Args:
        comm: The communicator of all ranks.
        blocks: The threads of each rank. None: as many as give every thread of every rank a core of
            its own, but at least 1.

    Returns:
        The number of threads of each rank, which is the same on all ranks, and this rank's cores:
        one for each thread, or none if there are fewer cores than threads.
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
