"""send_recv: the two ranks of a pair send to each other at the same time, by a send and a recv in
one group.

MPI's equivalents are Sendrecv, and a pair of persistent requests that are started together. NCCL's
is a send and a recv in one group, which PyTorch makes of an all_to_all_single whose other parts are
empty.
"""

from __future__ import annotations

import atexit
from dataclasses import replace
from functools import partial
from typing import Any

from ..harness.collective import Collective
from ..harness.data import count_wrong, make_input
from ..harness.pairs import partner_of, sendrecv_of
from ..harness.problem import Buffers, Call, Gather, Problem


def _check(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    buffers.load(make_input(problem, rank, seed))
    call()
    partner = partner_of(rank, problem.world_size)
    return count_wrong(buffers.result(), make_input(problem, partner, seed))


def _prepare(comm: Any, buffers: Buffers, problem: Problem, *, stream: Any = None, **_: Any) -> Any:
    partner = partner_of(comm.rank, comm.world_size)
    with comm.group(prepare=True) as both:
        comm.send(buffers.x, partner, stream=stream)
        comm.recv(buffers.out, partner, stream=stream)
    made: Any = partial(both)
    made.plan = replace(comm.send.prepare(buffers.x, partner).plan, name="send_recv")
    return made


def _direct(comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.world_size)
    x, out, group, send, recv = buffers.x, buffers.out, comm.group, comm.send, comm.recv

    def exchange() -> None:
        with group():
            send(x, partner)
            recv(out, partner)

    return exchange


def _mpi(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    return sendrecv_of(comm, buffers.x, buffers.out)


def _persistent(mpi: Any, comm: Any, buffers: Buffers, problem: Problem) -> Call:
    partner = partner_of(comm.rank, comm.size)
    requests = [comm.Recv_init(buffers.out, partner, 0), comm.Send_init(buffers.x, partner, 0)]
    for each in requests:
        # Frees the request at exit, before MPI is finalized.
        atexit.register(each.Free)
    start, wait = mpi.Prequest.Startall, mpi.Request.Waitall

    def exchange() -> None:
        start(requests)
        wait(requests)

    return exchange


def _nccl(dist: Any, buffers: Buffers, problem: Problem) -> Call:
    lengths = [0] * problem.world_size
    lengths[partner_of(dist.get_rank(), problem.world_size)] = problem.count
    return partial(dist.all_to_all_single, buffers.out, buffers.x, lengths, lengths)


COLLECTIVE = Collective(
    name="send_recv",
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
    mpi=_mpi,
    mpi_default="sendrecv",
    mpi_others={"persistent": _persistent},
    is_composed=True,
    is_apart=True,
    nccl=_nccl,
    is_apart_in_nccl=True,
)
