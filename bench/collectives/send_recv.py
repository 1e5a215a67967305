"""send_recv: the two ranks of a pair send to each other at the same time, by a send and a recv in
one group.

MPI's equivalents are Sendrecv, and a pair of persistent requests that are started together.
"""

from __future__ import annotations

import atexit
from dataclasses import replace
from typing import Any

import numpy as np

from ..harness.collective import Collective
from ..harness.pairs import check_exchange, partner_of, sendrecv
from ..harness.problem import Buffers, Call, Problem


def _prepare(comm: Any, buffers: Buffers, problem: Problem, **_: Any) -> Any:
    partner, x = partner_of(comm.rank, comm.world_size), buffers.x
    found = np.zeros_like(x)
    with comm.group(prepare=True) as both:
        comm.send(x, partner)
        comm.recv(found, partner)

    def exchange() -> object:
        both()
        return found

    made: Any = exchange
    made.plan = replace(comm.send.prepare(x, partner).plan, name="send_recv")
    return made


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner, x = partner_of(comm.rank, comm.world_size), buffers.x
    found = np.zeros_like(x)
    group, send, recv = comm.group, comm.send, comm.recv

    def exchange() -> object:
        with group():
            send(x, partner)
            recv(found, partner)
        return found

    return exchange


def _persistent(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner, x = partner_of(comm.rank, comm.size), buffers.x
    found = np.zeros_like(x)
    requests = [comm.Recv_init(found, partner, 0), comm.Send_init(x, partner, 0)]
    for each in requests:
        # Frees the request at exit, before MPI is finalized.
        atexit.register(each.Free)
    start, wait = mpi.Prequest.Startall, mpi.Request.Waitall

    def exchange() -> object:
        start(requests)
        wait(requests)
        return found

    return exchange


COLLECTIVE = Collective(
    name="send_recv",
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
    mpi_others={"persistent": _persistent},
    is_composed=True,
)
