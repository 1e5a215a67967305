"""reduce: the root ends with the reduction of all ranks' inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input, reduced
from ..harness.problem import Buffers, Call, Gather, Problem, torch_op


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    return count_wrong(buffers.result(), reduced(problem, seed)) if rank == problem.root else 0


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    return comm.reduce.prepare(buffers.x, problem.root, out=buffers.out, op=problem.op, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    # Makes the call as a user would, without arguments that have their default.
    keywords = {"op": problem.op} if problem.op != "sum" else {}
    return partial(comm.reduce, buffers.x, problem.root, out=buffers.out, **keywords)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    op = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[problem.op or "sum"]
    if comm.Get_rank() != problem.root:
        return partial(comm.Reduce, buffers.x, None, op, problem.root)
    mine = mpi.IN_PLACE if problem.in_place else buffers.x
    return partial(comm.Reduce, mine, buffers.out, op, problem.root)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(dist.reduce, buffers.x, problem.root, op=torch_op(dist, problem))


COLLECTIVE = Collective(
    name="reduce",
    order="relaxed",
    has_data=True,
    has_op=True,
    has_root=True,
    has_out=True,
    # A rank that is not the root may leave the call before the root has that rank's data.
    waits_for_all=False,
    busbw_factor=lambda world_size: 1.0,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
)
