"""signal: two partners meet. Each signals the other, and waits for the other's signal; no data.

MPI's ways of doing the same are Sendrecv of nothing, and a fence.
"""

from __future__ import annotations

import atexit
import time
from typing import Any

import numpy as np

from ..harness.collective import Collective
from ..harness.pairs import partner_of, sendrecv
from ..harness.problem import Buffers, Call, Gather, Problem

_LONGEST_DELAY_S = 0.002


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    """Lets ranks arrive at different times. A rank that leaves before its partner arrives is wrong.

    The clock is CLOCK_MONOTONIC, which all processes of one host share.
    """
    delay_s = np.random.default_rng((seed, rank)).uniform(0, _LONGEST_DELAY_S)
    call()
    time.sleep(delay_s)
    arrived_ns = time.monotonic_ns()
    call()
    left_ns = time.monotonic_ns()
    return int(left_ns < gather(arrived_ns)[partner_of(rank, problem.world_size)])


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **_: Any) -> Any:
    partner = partner_of(comm.rank, comm.world_size)
    signal, wait = comm.signal.prepare(partner), comm.wait.prepare(peer=partner)

    def meet() -> None:
        signal()
        wait()

    found: Any = meet
    found.plan = signal.plan
    return found


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.world_size)
    signal, wait = comm.signal, comm.wait

    def meet() -> None:
        signal(partner)
        wait(peer=partner)

    return meet


def _fence(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    window = mpi.Win.Allocate(1, comm=comm)
    # Free is collective. All ranks register it in the same order, and MPI is finalized later.
    atexit.register(window.Free)
    call: Call = window.Fence
    return call


COLLECTIVE = Collective(
    name="signal",
    order="acq_rel",
    has_data=False,
    has_op=False,
    has_root=False,
    has_out=False,
    waits_for_all=False,
    busbw_factor=lambda world_size: None,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=sendrecv,
    mpi_default="sendrecv",
    mpi_others={"fence": _fence},
    is_composed=True,
)
