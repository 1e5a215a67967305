"""all_reduce: every rank ends with the sum (product, minimum, maximum, average) of all ranks'
inputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..harness.chain import Chain
from ..harness.collective import Collective, OnGpus
from ..harness.data import count_wrong, make_input, reduced
from ..harness.forms import OF_SUMS, Form, of_data
from ..harness.problem import Array, Buffers, Call, Gather, Problem, TorchCalls, torch_op
from ..in_kernel.data import DISTINCT, changes, pattern, times, total


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    return count_wrong(buffers.result(), reduced(problem, seed))


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    out = None if problem.in_place else buffers.out
    return comm.all_reduce.prepare(buffers.x, out=out, op=problem.op, **plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    # Makes the call as a user would, without arguments that have their default.
    keywords: dict[str, Any] = {} if problem.in_place else {"out": buffers.out}
    if problem.op != "sum":
        keywords["op"] = problem.op
    return partial(comm.all_reduce, buffers.x, **keywords)


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    op = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[problem.op or "sum"]
    return partial(comm.Allreduce, mpi.IN_PLACE if problem.in_place else buffers.x, buffers.out, op)


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    return partial(dist.all_reduce, buffers.x, op=torch_op(dist, problem))


def _symm_mem(ops: Any, x: Any, handle: Any, out: Any, group: str, problem: Problem) -> TorchCalls:
    # PyTorch has one_shot only out of place, and two_shot only in place.
    one_shot = partial(ops.one_shot_all_reduce_out, x, problem.op, group, out)
    two_shot = partial(ops.two_shot_all_reduce_, x, problem.op, group)
    return {"one_shot": (one_shot, out), "two_shot": (two_shot, x)}


def _nvshmem(library: Any, x: int, problem: Problem, stream: int) -> Call:
    name = f"{library.type_of(problem.dtype)}_{problem.op}_reduce"
    call: Call = library.on_stream(name, x, x, problem.count, stream)
    return call


def _flashinfer(module: Any, scratch: Any, x: Any, out: Any) -> dict[str, Call]:
    def call(*, is_one_shot: bool) -> Call:
        return partial(
            module.allreduce_fusion,
            x,
            scratch,
            module.AllReduceFusionPattern.kAllReduce,
            # Programmatic dependent launch, as serving engines use it: the kernel may start before
            # the previous kernel has ended.
            launch_with_pdl=True,
            output=out,
            use_oneshot=is_one_shot,
        )

    calls = {"one_shot": call(is_one_shot=True)}
    # FlashInfer's two-shot divides whole rows among the ranks, so it needs more rows than ranks.
    if len(x) > scratch.world_size:
        calls["two_shot"] = call(is_one_shot=False)
    return calls


# ---- Inside kernels: each call multiplies the data by the number of ranks ------------------------


def _start(problem: Problem, rank: int) -> Array:
    return pattern(problem, problem.count, rank, 0)


def _factor(problem: Problem, rank: int, length: int) -> float:
    # A sum of equal data multiplies them by world_size, so `length` calls multiply them by
    # world_size ** length, which this factor undoes. The weights differ by rank, so that the ranks
    # send different data. Their mean is 1, so the next sum is that of equal data.
    weight = (2 * rank + 1) / problem.world_size
    return weight * float(problem.world_size) ** -length


def _end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    del rank
    # The Problem is the key of the lru_cache. Messages of at least DISTINCT elements differ only in
    # count and nbytes, so with these values all of them share one entry.
    few = replace(problem, count=min(problem.count, DISTINCT), nbytes=0)
    return np.resize(_sum_of_sums(few, calls, length), problem.count)


@lru_cache(maxsize=32)
def _sum_of_sums(problem: Problem, calls: int, length: int) -> Array:
    ranks = range(problem.world_size)
    factors = [_factor(problem, peer, length) for peer in ranks]
    values = [_start(problem, peer) for peer in ranks]
    before = changes(calls, length)
    for call in range(calls):
        if call in before:
            values = [times(each, by) for each, by in zip(values, factors, strict=True)]
        values = [total(values)] * problem.world_size
    return values[0]


_SUMS = "in_kernel::exchanged_sums<in_kernel::ExchangedSums<{type}, {world_size}>, {notes}>"

COLLECTIVE = Collective(
    name="all_reduce",
    order="relaxed",
    has_data=True,
    has_op=True,
    has_root=False,
    has_out=True,
    waits_for_all=True,
    # Each byte is sent once to be reduced and once as a result, except for the 1 / world_size of
    # the message that a rank reduces itself.
    busbw_factor=lambda world_size: 2 * (world_size - 1) / world_size,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    mpi_algorithm=("MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "recursive_doubling"),
    nccl=_nccl,
    symm_mem=_symm_mem,
    nvshmem=_nvshmem,
    flashinfer=_flashinfer,
    forms=(
        of_data("all_reduce_one_shot_ll16", "AllReduceSlices", "slice"),
        of_data("all_reduce_one_shot_ll16", "AllReduceMessage", "message"),
        Form(OF_SUMS, _SUMS, "message"),
    ),
    chain=Chain(_start, _end, _factor),
    on_gpus=OnGpus(
        order=0,
        outside="all",
        inside="all",
        sizes=("--sizes", "1K", "8K", "64K", "512K"),
        sizes_of_largest=("--sizes", "1K", "4K", "8K", "16K", "64K", "256K", "1M", "16M", "256M"),
    ),
)
