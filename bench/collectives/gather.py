"""gather: the root ends with all ranks' inputs, in rank order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input
from ..harness.problem import Buffers, Call, Gather, Problem


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    # Each rank first fills the whole message with its own data, so that a missing chunk is noticed.
    buffers.load(make_input(problem, rank, seed))
    call()
    if rank != problem.root:
        return 0
    ranks = range(problem.world_size)
    chunks = [make_input(problem, peer, seed)[problem.chunk(peer)] for peer in ranks]
    return count_wrong(buffers.result(), np.concatenate(chunks))


def _chunk(problem: Problem, buffers: Buffers, rank: int) -> Any:
    """Returns a rank's input: its chunk of `x`, both in place and out of place."""
    return buffers.x[problem.chunk(rank)]


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    mine = _chunk(problem, buffers, comm.rank)
    return comm.gather.prepare(mine, problem.root, out=buffers.out, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = _chunk(problem, buffers, comm.rank)
    return partial(comm.gather, mine, problem.root, out=buffers.out)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = _chunk(problem, buffers, comm.Get_rank())
    if comm.Get_rank() != problem.root:
        return partial(comm.Gather, mine, None, problem.root)
    return partial(
        comm.Gather, mpi.IN_PLACE if problem.in_place else mine, buffers.out, problem.root
    )


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    chunks = None
    if dist.get_rank() == problem.root:
        chunks = [buffers.out[problem.chunk(rank)] for rank in range(problem.world_size)]
    mine = _chunk(problem, buffers, dist.get_rank())
    return partial(dist.gather, mine, chunks, dst=problem.root)


COLLECTIVE = Collective(
    name="gather",
    order="relaxed",
    has_data=True,
    has_op=False,
    has_root=True,
    has_out=True,
    has_chunks=True,
    # A rank that is not the root may leave the call before the root has that rank's data.
    waits_for_all=False,
    # The root does not receive its own chunk, which is 1 / world_size of the message.
    busbw_factor=lambda world_size: (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
)
