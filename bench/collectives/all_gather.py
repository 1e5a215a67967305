"""all_gather: every rank ends with all ranks' inputs, in rank order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..harness.chain import Chain
from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input
from ..harness.forms import of_data
from ..harness.problem import Array, Buffers, Call, Gather, Problem
from ..in_kernel.data import SHIFTS, pattern


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    # Each rank first fills the whole message with its own data, so that a missing chunk is noticed.
    buffers.load(make_input(problem, rank, seed))
    call()
    ranks = range(problem.world_size)
    chunks = [make_input(problem, peer, seed)[problem.chunk(peer)] for peer in ranks]
    return count_wrong(buffers.result(), np.concatenate(chunks))


def _chunk(problem: Problem, buffers: Buffers, rank: int) -> Any:
    """Returns a rank's input: its chunk of `x`, both in place and out of place."""
    return buffers.x[problem.chunk(rank)]


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    mine = _chunk(problem, buffers, comm.rank)
    return comm.all_gather.prepare(mine, out=buffers.out, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = _chunk(problem, buffers, comm.rank)
    return partial(comm.all_gather, mine, out=buffers.out)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = mpi.IN_PLACE if problem.in_place else _chunk(problem, buffers, comm.rank)
    return partial(comm.Allgather, mine, buffers.out)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = _chunk(problem, buffers, dist.get_rank())
    return partial(dist.all_gather_into_tensor, buffers.out, mine)


# ---- Inside kernels: some calls shift all chunks by one rank -------------------------------------


def _start(problem: Problem, rank: int) -> Array:
    del rank
    length = problem.count // problem.world_size
    return np.concatenate([pattern(problem, length, p, 0) for p in range(problem.world_size)])


def _end(problem: Problem, rank: int, calls: int, _period: int) -> Array:
    length = problem.count // problem.world_size
    moved = sum(SHIFTS >> call % 64 & 1 for call in range(calls))
    return np.roll(_start(problem, rank), -length * moved)


COLLECTIVE = Collective(
    name="all_gather",
    order="relaxed",
    has_data=True,
    has_op=False,
    has_root=False,
    has_out=True,
    has_chunks=True,
    waits_for_all=True,
    # A rank does not send or receive its own chunk, which is 1 / world_size of the message.
    busbw_factor=lambda world_size: (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
    forms=(of_data("all_gather_direct_ll16", "AllGather", "slice"),),
    chain=Chain(_start, _end),
    is_apart_in_kernels=True,
)
