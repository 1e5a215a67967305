"""broadcast: every rank ends with the root's data."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..harness.collective import Buffers, Call, Collective, Comm, Gather, Problem
from ..harness.data import count_wrong, make_input


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    # Each rank starts with its own data, so that a rank that receives nothing shows.
    buffers.load(make_input(problem, rank, seed))
    call()
    return count_wrong(buffers.result(), make_input(problem, problem.root or 0, seed))


def _prepare(comm: Comm, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    return comm.broadcast.prepare(buffers.x, root=problem.root, **plan)


def _direct(comm: Comm, buffers: Buffers, problem: Problem) -> Call:
    return partial(comm.broadcast, buffers.x, root=problem.root)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(comm.Bcast, buffers.x, problem.root)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(dist.broadcast, buffers.x, src=problem.root)


def _nvshmem(library: Any, x: int, problem: Problem, stream: int) -> Call:
    call: Call = library.on_stream("broadcastmem", x, x, problem.nbytes, problem.root or 0, stream)
    return call


COLLECTIVE = Collective(
    name="broadcast",
    order="relaxed",
    has_data=True,
    has_op=False,
    has_root=True,
    has_out=False,
    # The root leaves before the others have its data.
    waits_for_all=False,
    busbw_factor=lambda world_size: 1.0,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
    nvshmem=_nvshmem,
)
