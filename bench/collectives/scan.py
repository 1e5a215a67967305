"""scan: every rank ends with the reduction of the inputs of all lower ranks and of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input, reduced
from ..harness.problem import Buffers, Call, Gather, Problem


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    return count_wrong(buffers.result(), reduced(problem, seed, num_terms=rank + 1))


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    return comm.scan.prepare(buffers.x, out=buffers.out, op=problem.op, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    # Makes the call as a user would, without arguments that have their default.
    keywords = {"op": problem.op} if problem.op != "sum" else {}
    return partial(comm.scan, buffers.x, out=buffers.out, **keywords)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    op = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[problem.op or "sum"]
    return partial(comm.Scan, mpi.IN_PLACE if problem.in_place else buffers.x, buffers.out, op)


COLLECTIVE = Collective(
    name="scan",
    order="relaxed",
    has_data=True,
    has_op=True,
    has_root=False,
    has_out=True,
    waits_for_all=True,
    busbw_factor=lambda world_size: 1.0,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
)
