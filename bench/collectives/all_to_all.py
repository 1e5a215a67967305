"""all_to_all: every rank ends with its chunk of each rank's input."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..harness.chain import Chain
from ..harness.collective import Collective, OnGpus
from ..harness.data import count_wrong, make_input
from ..harness.forms import of_data
from ..harness.problem import Array, Buffers, Call, Gather, Problem
from ..in_kernel.data import changes, pattern, times


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    ranks = range(problem.world_size)
    chunks = [make_input(problem, peer, seed)[problem.chunk(rank)] for peer in ranks]
    return count_wrong(buffers.result(), np.concatenate(chunks))


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    return comm.all_to_all.prepare(buffers.x, out=buffers.out, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(comm.all_to_all, buffers.x, out=buffers.out)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(comm.Alltoall, mpi.IN_PLACE if problem.in_place else buffers.x, buffers.out)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(dist.all_to_all_single, buffers.out, buffers.x)


# ---- Inside kernels: calls are in place, so each second call moves every chunk back --------------


def _start(problem: Problem, rank: int) -> Array:
    length = problem.count // problem.world_size
    chunks = [pattern(problem, length, rank, 1 + p) for p in range(problem.world_size)]
    return np.concatenate(chunks)


def _end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    world_size = problem.world_size
    # factors[rank, chunk]: by what the data now in that chunk have been multiplied so far.
    # origins[rank, chunk]: the rank and the chunk in which these data were at the start.
    factors = np.ones((world_size, world_size))
    origins = np.moveaxis(np.indices(factors.shape), 0, -1)
    own = np.array([_factor(problem, each, length) for each in range(world_size)])
    before = changes(calls, length)
    for call in range(calls):
        if call in before:
            factors *= own[:, np.newaxis]
        factors, origins = factors.T.copy(), origins.swapaxes(0, 1)
    chunk = problem.count // world_size
    found = [
        times(pattern(problem, chunk, origin[0], 1 + origin[1]), factor)
        for origin, factor in zip(origins[rank].tolist(), factors[rank].tolist(), strict=True)
    ]
    return np.concatenate(found)


def _factor(problem: Problem, rank: int, length: int) -> float:
    """Returns -1 for even ranks, so that the data that they send change, and 1 for odd ranks."""
    del problem, length
    return 1.0 if rank % 2 else -1.0


COLLECTIVE = Collective(
    name="all_to_all",
    order="relaxed",
    has_data=True,
    has_op=False,
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
    is_apart_in_nccl=True,
    on_gpus=OnGpus(sizes=("--out-of-place", *OnGpus().sizes)),
    forms=(of_data("all_to_all_direct_ll16", "AllToAll", "slice"),),
    chain=Chain(_start, _end, _factor),
)
