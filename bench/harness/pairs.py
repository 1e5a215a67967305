"""Shared code of collectives between pairs. Ranks 2k and 2k + 1 are partners. A last rank without a
partner is its own partner.

A rank receives in a window with two slots, each with room for one message. Calls use them in turn,
so that a rank may still read one slot while its partner already fills the other.
"""

from __future__ import annotations

import atexit
from typing import Any, cast

import numpy as np

from .data import count_wrong, make_input
from .problem import SPOILED, Array, Buffers, Call, Gather, Problem

SLOTS = 2


def partner_of(rank: int, world_size: int) -> int:
    """Returns the other rank of a pair."""
    other = rank ^ 1
    return other if other < world_size else rank


def check_exchange(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    """Exchanges once through each slot, with different data, and checks what the calls return."""
    partner = partner_of(rank, problem.world_size)
    wrong = 0
    for turn in range(SLOTS):
        buffers.load(make_input(problem, rank, seed + turn))
        wrong += count_wrong(cast(Array, call()), make_input(problem, partner, seed + turn))
        # Waits for all ranks before the array changes: after MPI's fence, the partner may still be
        # reading it.
        gather(None)
    return wrong


def slots_of(comm: Any, problem: Problem) -> tuple[Any, Array]:
    """Returns a window of KCCL with the slots, and this rank's part of it as an array [slot,
    element]. Collective.
    """
    window = comm.window(SLOTS * problem.nbytes)
    slots = np.frombuffer(window.local, problem.np_dtype).reshape(SLOTS, -1)
    slots.view(np.uint8).fill(SPOILED)
    # Waits for all ranks, so that no partner fills a slot before it has been spoiled.
    comm.barrier()
    return window, slots


def mpi_slots_of(mpi: Any, comm: Any, problem: Problem) -> tuple[Any, Array]:
    """Returns an MPI window with the slots, and this rank's part of it as an array [slot, element].
    Displacements in the window are numbers of slots. Collective.
    """
    window = mpi.Win.Allocate(SLOTS * problem.nbytes, problem.nbytes, comm=comm)
    # Frees the window at exit, before MPI is finalized. Win.Free is collective: all ranks register
    # their windows in the same order, so they also free them in the same order.
    atexit.register(window.Free)
    return window, np.frombuffer(window.tomemory(), problem.np_dtype).reshape(SLOTS, -1)


def sendrecv(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    """Returns an exchange by MPI's two-sided call."""
    return sendrecv_of(comm, buffers.x, np.zeros_like(buffers.x))


def sendrecv_of(comm: Any, x: Array, found: Array) -> Call:
    """Returns a function that sends `x` to the partner and receives `found` by Sendrecv."""
    partner = partner_of(comm.rank, comm.size)

    def exchange() -> object:
        comm.Sendrecv(x, partner, 0, found, partner, 0)
        return found

    return exchange
