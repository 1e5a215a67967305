"""reduce_scatter: every rank ends with its chunk of the reduction of all ranks' inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..harness.collective import Buffers, Call, Collective, Comm, Gather, Problem
from ..harness.data import count_wrong, make_input, reduced


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    mine = problem.chunk(rank)
    return count_wrong(buffers.result()[mine], reduced(problem, seed)[mine])


def _chunk(problem: Problem, buffers: Buffers, rank: int) -> Any:
    """A rank's result: its chunk of `out`, both in place and out of place."""
    return buffers.out[problem.chunk(rank)]


def _prepare(comm: Comm, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    mine = _chunk(problem, buffers, comm.rank)
    return comm.reduce_scatter.prepare(buffers.x, out=mine, op=problem.op, **plan)


def _direct(comm: Comm, buffers: Buffers, problem: Problem) -> Call:
    # As a user writes it: without arguments that have their default.
    keywords = {"op": problem.op} if problem.op != "sum" else {}
    mine = _chunk(problem, buffers, comm.rank)
    return partial(comm.reduce_scatter, buffers.x, out=mine, **keywords)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    op = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[problem.op or "sum"]
    mine = _chunk(problem, buffers, comm.rank)
    return partial(comm.Reduce_scatter_block, buffers.x, mine, op)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    name = "PRODUCT" if problem.op == "prod" else str(problem.op).upper()
    mine = _chunk(problem, buffers, dist.get_rank())
    return partial(dist.reduce_scatter_tensor, mine, buffers.x, op=getattr(dist.ReduceOp, name))


COLLECTIVE = Collective(
    name="reduce_scatter",
    order="relaxed",
    has_data=True,
    has_op=True,
    has_root=False,
    has_out=True,
    has_chunks=True,
    waits_for_all=True,
    # A rank's own chunk does not travel.
    busbw_factor=lambda world_size: (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
)
