"""scatter: every rank ends with its chunk of the root's input."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input
from ..harness.problem import Buffers, Call, Gather, Problem


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    # Each rank starts with its own data, so that a rank that receives nothing is noticed.
    buffers.load(make_input(problem, rank, seed))
    call()
    mine = problem.chunk(rank)
    return count_wrong(buffers.result()[mine], make_input(problem, problem.root or 0, seed)[mine])


def _chunk(problem: Problem, buffers: Buffers, rank: int) -> Any:
    """Returns a rank's result: its chunk of `out`, both in place and out of place."""
    return buffers.out[problem.chunk(rank)]


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    whole = buffers.x if comm.rank == problem.root else None
    mine = _chunk(problem, buffers, comm.rank)
    return comm.scatter.prepare(whole, problem.root, out=mine, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    whole = buffers.x if comm.rank == problem.root else None
    return partial(comm.scatter, whole, problem.root, out=_chunk(problem, buffers, comm.rank))


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = _chunk(problem, buffers, comm.Get_rank())
    if comm.Get_rank() != problem.root:
        return partial(comm.Scatter, None, mine, problem.root)
    return partial(
        comm.Scatter, buffers.x, mpi.IN_PLACE if problem.in_place else mine, problem.root
    )


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    chunks = None
    if dist.get_rank() == problem.root:
        chunks = [buffers.x[problem.chunk(rank)] for rank in range(problem.world_size)]
    mine = _chunk(problem, buffers, dist.get_rank())
    return partial(dist.scatter, mine, chunks, src=problem.root)


COLLECTIVE = Collective(
    name="scatter",
    order="relaxed",
    has_data=True,
    has_op=False,
    has_root=True,
    has_out=True,
    has_chunks=True,
    # The root may leave the call before the other ranks have the root's data.
    waits_for_all=False,
    # The root does not send its own chunk, which is 1 / world_size of the message.
    busbw_factor=lambda world_size: (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
)
