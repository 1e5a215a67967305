"""barrier: no rank leaves before the last one has arrived."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from ..harness.collective import Collective, OnGpus
from ..harness.forms import ORDERS, of_barriers
from ..harness.problem import Buffers, Call, Gather, Problem, TorchCalls

_LONGEST_DELAY_S = 0.002


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    """Makes ranks arrive at random times. Returns 1 if this rank left the barrier before the last
    rank had arrived, else 0.

    Ranks compare times of CLOCK_MONOTONIC, which is the same for all processes of one host.
    """
    delay_s = np.random.default_rng((seed, rank)).uniform(0, _LONGEST_DELAY_S)
    call()
    time.sleep(delay_s)
    arrived_ns = time.monotonic_ns()
    call()
    left_ns = time.monotonic_ns()
    return int(left_ns < max(gather(arrived_ns)))


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **plan: Any) -> Any:
    return comm.barrier.prepare(**plan)


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    call: Call = comm.barrier
    return call


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    call: Call = comm.Barrier
    return call


def _symm_mem(ops: Any, x: Any, handle: Any, out: Any, group: str, problem: Problem) -> TorchCalls:
    return {"barrier": (partial(handle.barrier, channel=0), x)}


def _nvshmem(library: Any, x: int, problem: Problem, stream: int) -> Call:
    call: Call = library.on_stream("barrier", stream)
    return call


COLLECTIVE = Collective(
    name="barrier",
    order="acq_rel",
    has_data=False,
    has_op=False,
    has_root=False,
    has_out=False,
    waits_for_all=True,
    busbw_factor=lambda world_size: None,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_mpi,
    symm_mem=_symm_mem,
    nvshmem=_nvshmem,
    forms=tuple(
        of_barriers("barrier_direct", f"RankBarrier<{ORDERS[order]}, {{world_size}}>", order)
        for order in ORDERS
    ),
    on_gpus=OnGpus(order=1, outside="all", inside="all", sizes=(), sizes_inside=()),
)
