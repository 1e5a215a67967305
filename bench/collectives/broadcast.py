"""broadcast: every rank ends with the root's data."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..harness.chain import Chain
from ..harness.collective import Collective, OnGpus
from ..harness.data import count_wrong, make_input
from ..harness.forms import of_data
from ..harness.problem import Array, Buffers, Call, Gather, Problem
from ..in_kernel.data import changes, pattern, times


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    # Each rank starts with its own data, so that a rank that receives nothing is noticed.
    buffers.load(make_input(problem, rank, seed))
    call()
    return count_wrong(buffers.result(), make_input(problem, problem.root or 0, seed))


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    return comm.broadcast.prepare(buffers.x, root=problem.root, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(comm.broadcast, buffers.x, root=problem.root)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(comm.Bcast, buffers.x, problem.root)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(dist.broadcast, buffers.x, src=problem.root)


def _nvshmem(library: Any, x: int, problem: Problem, stream: int) -> Call:
    call: Call = library.on_stream("broadcastmem", x, x, problem.nbytes, problem.root or 0, stream)
    return call


# ---- Inside kernels: every call sends what the root has received ---------------------------------


def _start(problem: Problem, rank: int) -> Array:
    return pattern(problem, problem.count, rank, 0)


def _end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    del rank
    changed = -1.0 if len(changes(calls, length)) % 2 else 1.0
    return times(_start(problem, 0), changed)


COLLECTIVE = Collective(
    name="broadcast",
    order="relaxed",
    has_data=True,
    has_op=False,
    has_root=True,
    has_out=False,
    # The root may leave the call before the other ranks have the root's data.
    waits_for_all=False,
    busbw_factor=lambda world_size: 1.0,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    nccl=_nccl,
    nvshmem=_nvshmem,
    forms=(of_data("broadcast_direct_ll16", "Broadcast", "slice"),),
    chain=Chain(_start, _end),
    on_gpus=OnGpus(order=5, outside="all", sizes=("-b", "1K", "-e", "64K", "-f", "8")),
)
