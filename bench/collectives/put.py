"""put: a halo exchange. Each rank puts its array into its partner's window, signals, and waits for
the partner's signal. Ranks 2k and 2k + 1 are partners; a last one without a partner is its own.

Two slots take turns, so that a rank may read one while its partner already fills the other. MPI's
ways of doing the same are Sendrecv, and Put into a window with a fence behind it.
"""

from __future__ import annotations

import atexit
from itertools import cycle
from typing import Any, cast

import numpy as np

from ..harness.collective import SPOILED, Array, Buffers, Call, Collective, Gather, Problem
from ..harness.data import count_wrong, make_input

_SLOTS = 2


def _partner(rank: int, world_size: int) -> int:
    other = rank ^ 1
    return other if other < world_size else rank


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    """Exchanges once through each slot, each time with other data; a call returns what has come."""
    partner = _partner(rank, problem.world_size)
    wrong = 0
    for turn in range(_SLOTS):
        buffers.load(make_input(problem, rank, seed + turn))
        wrong += count_wrong(cast(Array, call()), make_input(problem, partner, seed + turn))
        # Before the array changes: MPI's fence lets a rank go on before its partner has read.
        gather(None)
    return wrong


def _slots_of(comm: Any, problem: Problem) -> tuple[Any, Array]:
    """A window with the slots, and this rank's part of it as an array."""
    window = comm.window(_SLOTS * problem.nbytes)
    slots = np.frombuffer(window.local, problem.np_dtype).reshape(_SLOTS, -1)
    slots.view(np.uint8).fill(SPOILED)
    # No partner fills a slot before it has been spoiled.
    comm.barrier()
    return window, slots


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **_: Any) -> Any:
    partner = _partner(comm.rank, comm.world_size)
    window, slots = _slots_of(comm, problem)
    puts = [
        comm.put.prepare(buffers.x, partner, window, slot * problem.nbytes)
        for slot in range(_SLOTS)
    ]
    turns = cycle(list(zip(puts, slots, strict=True)))
    signal, wait = comm.signal.prepare(partner), comm.wait.prepare(peer=partner)

    def exchange() -> object:
        put, slot = next(turns)
        put()
        signal()
        wait()
        return slot

    # A function itself, because a further call would cost as much as one of these three.
    found: Any = exchange
    found.plan = puts[0].plan
    return found


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = _partner(comm.rank, comm.world_size)
    window, slots = _slots_of(comm, problem)
    x, put, signal, wait = buffers.x, comm.put, comm.signal, comm.wait
    turns = cycle([(slot * problem.nbytes, slots[slot]) for slot in range(_SLOTS)])

    def exchange() -> object:
        offset, slot = next(turns)
        put(x, partner, window, offset)
        signal(partner)
        wait(peer=partner)
        return slot

    return exchange


def _sendrecv(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = _partner(comm.rank, comm.size)
    x, found = buffers.x, np.zeros_like(buffers.x)

    def exchange() -> object:
        comm.Sendrecv(x, partner, 0, found, partner, 0)
        return found

    return exchange


def _put_fence(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = _partner(comm.rank, comm.size)
    x = buffers.x
    window = mpi.Win.Allocate(_SLOTS * problem.nbytes, problem.nbytes, comm=comm)
    # Collective, so all ranks free their windows in the same order. MPI ends after that.
    atexit.register(window.Free)
    slots = np.frombuffer(window.tomemory(), x.dtype).reshape(_SLOTS, -1)
    turns = cycle(list(enumerate(slots)))
    window.Fence()

    def exchange() -> object:
        slot, found = next(turns)
        window.Put(x, partner, slot)
        window.Fence()
        return found

    return exchange


COLLECTIVE = Collective(
    name="put",
    order="acq_rel",
    has_data=True,
    has_op=False,
    has_root=False,
    has_out=False,
    waits_for_all=False,
    busbw_factor=lambda world_size: 1.0,
    check=_check,
    prepare=_prepare,
    direct=_direct,
    mpi=_sendrecv,
    mpi_default="sendrecv",
    mpi_others={"put_fence": _put_fence},
    is_composed=True,
)
