"""get: a halo exchange that pulls. Each rank copies its array into its own window, signals, waits
for its partner's signal, and gets the partner's array.

A call first copies its array into the buffer that the partner reads, and so do MPI's calls. So each
call moves new data. Otherwise the reader would find the data of the call before in its own cache,
and nothing would move between the cores.

Each window has two slots, which calls use in turn. So a rank fills a slot again two calls later. In
the call between, it has waited for a signal that its partner sent after reading that slot. MPI's
equivalents are Sendrecv, and Get between two fences.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np

from ..harness.collective import Collective
from ..harness.pairs import SLOTS, check_exchange, mpi_slots_of, partner_of, sendrecv_of, slots_of
from ..harness.problem import Buffers, Call, Problem


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **_: Any) -> Any:
    partner = partner_of(comm.rank, comm.world_size)
    window, _slots = slots_of(comm, problem)
    found, x = np.zeros_like(buffers.x), buffers.x
    offsets = [slot * problem.nbytes for slot in range(SLOTS)]
    gets = [comm.get.prepare(found, partner, window, offset) for offset in offsets]
    fills = [comm.put.prepare(x, comm.rank, window, offset) for offset in offsets]
    turns = cycle(list(zip(fills, gets, strict=True)))
    signal, wait = comm.signal.prepare(partner), comm.wait.prepare(peer=partner)

    def exchange() -> object:
        fill, get = next(turns)
        fill()
        signal()
        wait()
        get()
        return found

    # The harness needs `plan` on what is returned. It is set on the function itself, because an
    # object around the function would cost as much as one of these four calls.
    made: Any = exchange
    made.plan = gets[0].plan
    return made


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.world_size)
    window, _slots = slots_of(comm, problem)
    found, x, rank = np.zeros_like(buffers.x), buffers.x, comm.rank
    put, signal, wait, get = comm.put, comm.signal, comm.wait, comm.get
    turns = cycle([slot * problem.nbytes for slot in range(SLOTS)])

    def exchange() -> object:
        offset = next(turns)
        put(x, rank, window, offset)
        signal(partner)
        wait(peer=partner)
        get(found, partner, window, offset)
        return found

    return exchange


def _sendrecv(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    mine, x = np.zeros_like(buffers.x), buffers.x
    send = sendrecv_of(comm, mine, np.zeros_like(mine))

    def exchange() -> object:
        mine[:] = x
        return send()

    return exchange


def _get_fence(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.size)
    x, found = buffers.x, np.zeros_like(buffers.x)
    window, slots = mpi_slots_of(mpi, comm, problem)
    turns = cycle(list(enumerate(slots)))
    window.Fence()

    def exchange() -> object:
        slot, mine = next(turns)
        mine[:] = x
        window.Fence()
        window.Get(found, partner, slot)
        window.Fence()
        return found

    return exchange


COLLECTIVE = Collective(
    name="get",
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
    mpi=_sendrecv,
    mpi_default="sendrecv",
    mpi_others={"get_fence": _get_fence},
    is_composed=True,
    is_on_cpus=True,
)
