"""put: a halo exchange. Each rank puts its array into its partner's window, signals, and waits for
the partner's signal.

MPI's equivalents are Sendrecv, and Put into a window followed by a fence.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

from ..harness.collective import Collective
from ..harness.pairs import SLOTS, check_exchange, mpi_slots_of, partner_of, sendrecv, slots_of
from ..harness.problem import Buffers, Call, Problem


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **_: Any) -> Any:
    partner = partner_of(comm.rank, comm.world_size)
    window, slots = slots_of(comm, problem)
    puts = [
        comm.put.prepare(buffers.x, partner, window, slot * problem.nbytes) for slot in range(SLOTS)
    ]
    turns = cycle(list(zip(puts, slots, strict=True)))
    signal, wait = comm.signal.prepare(partner), comm.wait.prepare(peer=partner)

    def exchange() -> object:
        put, slot = next(turns)
        put()
        signal()
        wait()
        return slot

    # The harness needs `plan` on what is returned. It is set on the function itself, because an
    # object around the function would cost as much as one of these three calls.
    found: Any = exchange
    found.plan = puts[0].plan
    return found


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.world_size)
    window, slots = slots_of(comm, problem)
    x, put, signal, wait = buffers.x, comm.put, comm.signal, comm.wait
    turns = cycle([(slot * problem.nbytes, slots[slot]) for slot in range(SLOTS)])

    def exchange() -> object:
        offset, slot = next(turns)
        put(x, partner, window, offset)
        signal(partner)
        wait(peer=partner)
        return slot

    return exchange


def _put_fence(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.size)
    x = buffers.x
    window, slots = mpi_slots_of(mpi, comm, problem)
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
    check=check_exchange,
    prepare=_prepare,
    direct=_direct,
    mpi=sendrecv,
    mpi_default="sendrecv",
    mpi_others={"put_fence": _put_fence},
    is_composed=True,
    is_on_cpus=True,
)
