"""reduce_scatter: every rank ends with its chunk of the reduction of all ranks' inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..harness.chain import Chain
from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input, reduced
from ..harness.forms import of_data
from ..harness.problem import Array, Buffers, Call, Gather, Problem, torch_op
from ..in_kernel.data import DISTINCT, SHORTEST_TIMED, changes, pattern, times, total


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    mine = problem.chunk(rank)
    return count_wrong(buffers.result()[mine], reduced(problem, seed)[mine])


def _chunk(problem: Problem, buffers: Buffers, rank: int) -> Any:
    """Returns a rank's result: its chunk of `out`, both in place and out of place."""
    return buffers.out[problem.chunk(rank)]


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    mine = _chunk(problem, buffers, comm.rank)
    return comm.reduce_scatter.prepare(buffers.x, out=mine, op=problem.op, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    # Makes the call as a user would, without arguments that have their default.
    keywords = {"op": problem.op} if problem.op != "sum" else {}
    mine = _chunk(problem, buffers, comm.rank)
    return partial(comm.reduce_scatter, buffers.x, out=mine, **keywords)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    op = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[problem.op or "sum"]
    mine = _chunk(problem, buffers, comm.rank)
    return partial(comm.Reduce_scatter_block, buffers.x, mine, op)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    mine = _chunk(problem, buffers, dist.get_rank())
    return partial(dist.reduce_scatter_tensor, mine, buffers.x, op=torch_op(dist, problem))


# ---- Inside kernels: every call adds the peers' chunks to the rank's own -------------------------


def _chunks(problem: Problem, rank: int) -> list[Array]:
    length = problem.count // problem.world_size
    ranks = range(problem.world_size)
    return [pattern(problem, length, rank, 1 + chunk) for chunk in ranks]


def _start(problem: Problem, rank: int) -> Array:
    return np.concatenate(_chunks(problem, rank))


def _end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    chunk = problem.count // problem.world_size
    few = replace(problem, count=min(chunk, DISTINCT) * problem.world_size, nbytes=0)
    return np.resize(_own_chunk(few, rank, calls, length), chunk)


@lru_cache(maxsize=32)
def _own_chunk(problem: Problem, rank: int, calls: int, length: int) -> Array:
    ranks = range(problem.world_size)
    values = [_chunks(problem, peer)[rank] for peer in ranks]
    before = changes(calls, length)
    for call in range(calls):
        if call in before:
            changed = {rank} if length >= SHORTEST_TIMED else {*ranks} - {rank}
            values = [times(values[k], -1.0) if k in changed else values[k] for k in ranks]
        values[rank] = total(values)
    return values[rank]


COLLECTIVE = Collective(
    name="reduce_scatter",
    order="relaxed",
    has_data=True,
    has_op=True,
    has_root=False,
    has_out=True,
    has_chunks=True,
    waits_for_all=True,
    # A rank does not send its own chunk, which is 1 / world_size of the message.
    busbw_factor=lambda world_size: (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
    forms=(of_data("reduce_scatter_direct_ll16", "ReduceScatter", "slice"),),
    chain=Chain(_start, _end, part=lambda problem, rank: problem.chunk(rank)),
)
