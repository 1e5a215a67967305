"""What the one-sided calls have in common: ranks 2k and 2k + 1 are partners, and a last one without
a partner is its own.

In an exchange of data two slots take turns, so that a rank may read one while its partner already
fills the other.
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
    """Exchanges once through each slot, each time with other data; a call returns what has come."""
    partner = partner_of(rank, problem.world_size)
    wrong = 0
    for turn in range(SLOTS):
        buffers.load(make_input(problem, rank, seed + turn))
        wrong += count_wrong(cast(Array, call()), make_input(problem, partner, seed + turn))
        # Before the array changes: MPI's fence lets a rank go on before its partner has read.
        gather(None)
    return wrong


def slots_of(comm: Any, problem: Problem) -> tuple[Any, Array]:
    """Returns a window of KCCL with the slots, and this rank's part of it as an array."""
    window = comm.window(SLOTS * problem.nbytes)
    slots = np.frombuffer(window.local, problem.np_dtype).reshape(SLOTS, -1)
    slots.view(np.uint8).fill(SPOILED)
    # No partner fills a slot before it has been spoiled.
    comm.barrier()
    return window, slots


def mpi_slots_of(mpi: Any, comm: Any, problem: Problem) -> tuple[Any, Array]:
    """Slots of MPI's windows, whose offsets count messages."""
    window = mpi.Win.Allocate(SLOTS * problem.nbytes, problem.nbytes, comm=comm)
    # Collective, so all ranks free their windows in the same order. MPI ends after that.
    atexit.register(window.Free)
    return window, np.frombuffer(window.tomemory(), problem.np_dtype).reshape(SLOTS, -1)


def sendrecv(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    """MPI's two-sided way of an exchange."""
    return sendrecv_of(comm, buffers.x)


def sendrecv_of(comm: Any, x: Array) -> Call:
    """Returns an exchange of this array with the partner."""
    partner, found = partner_of(comm.rank, comm.size), np.zeros_like(x)

    def exchange() -> object:
        comm.Sendrecv(x, partner, 0, found, partner, 0)
        return found

    return exchange
