"""Chooses how many threads a rank has. topology/placement.py says on which cores they run."""

import os
from collections.abc import Sequence

import kccl

from ..base.core import lib


def place(comm: kccl.Communicator, blocks: int | None) -> tuple[int, Sequence[int]]:
    """Chooses the number of threads of each rank and the cores of this rank's. Collective: all
    ranks must call it.

    A launcher may have bound each process to other cores, and some to more than others.

    Args:
        comm: The ranks.
        blocks: The threads of each rank. None: at least 1, and as many as leave a core for each
            thread on every rank.

    Returns:
        The number of threads of each rank, which is the same on all. And this rank's cores: one for
        each thread, or none if there are fewer cores than threads.
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
