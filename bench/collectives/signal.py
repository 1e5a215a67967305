"""signal: two ranks wait for each other. Each signals its partner, and waits for its partner's
signal. No data are sent.

MPI's equivalents are Sendrecv of an empty message, and the fence of a window.
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
    """Makes ranks arrive at random times. Returns 1 if this rank left before its partner had
    arrived, else 0.

    Ranks compare times of CLOCK_MONOTONIC, which is the same for all processes of one host.
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
    # Frees the window at exit, before MPI is finalized. Win.Free is collective: all ranks register
    # their windows in the same order, so they also free them in the same order.
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
    is_on_cpus=True,
)
