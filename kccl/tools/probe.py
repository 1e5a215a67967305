"""The floors: what the machine itself costs, measured beside every result."""

import statistics
from typing import Any

from ..base.abi import LINE_BYTES, ffi, lib
from ..base.errors import InvalidArgument, Timeout
from ..comm import Communicator

_ROUND_TRIPS = 20_000
_LIMIT_NS = 5_000_000_000


def one_way_latency_us(comm: Communicator) -> float:
    """Microseconds for one cache line's way from rank 0 to rank 1: half a ping-pong. Collective.

    0.0 for one rank. Two ranks that share a core measure the scheduler, not the line.

    Raises:
        InvalidArgument: The windows are in GPU memory, which the host cannot poll.
    """
    if comm.backend == "cuda":
        raise InvalidArgument('comm has backend "cuda", must be one in host memory')
    if comm.world_size == 1:
        return 0.0
    window = comm.window(LINE_BYTES)
    result = None
    if comm.rank < 2:
        mine = ffi.cast("uint32_t *", window.addresses[comm.rank])
        theirs = ffi.cast("uint32_t *", window.addresses[1 - comm.rank])
        round_trips = _ROUND_TRIPS
        result = lib.kccl_host_ping_pong(mine, theirs, round_trips, comm.rank == 0, _LIMIT_NS)
    everyone = comm.gather_objects(result)
    if everyone[0] < 0 or everyone[1] < 0:
        raise Timeout(
            "ranks 0 and 1 did not answer each other in the ping-pong",
            rank=comm.rank,
            peer=1 if everyone[0] < 0 else 0,
            collective="ping-pong",
        )
    return float(everyone[0]) * 1e-3


def core_to_core_us(cpu_a: int, cpu_b: int) -> float:
    """Microseconds for one cache line's way between two logical CPUs, by two pinned threads.

    Raises:
        Timeout: One of them may not run here.
    """
    one_way_ns = lib.kccl_host_core_ping_pong(cpu_a, cpu_b, _ROUND_TRIPS)
    if one_way_ns < 0:
        raise Timeout(
            f"no answer between CPUs {cpu_a} and {cpu_b}: one of them is not this process's",
            rank=0,
            collective="ping-pong",
        )
    return float(one_way_ns) * 1e-3


def copy_us(comm: Communicator, nbytes: int) -> float:
    """Microseconds in which every rank copies `nbytes` at once, slowest rank. Collective."""
    iterations = max(5, min(2000, (1 << 26) // max(nbytes, 1)))
    us = ffi.new("double[]", iterations)
    size = max(nbytes, 1)
    source: Any = ffi.from_buffer(bytearray(size))
    target: Any = ffi.from_buffer(bytearray(size))
    comm.barrier()
    lib.kccl_host_copy(target, source, nbytes, iterations, us)
    median = statistics.median(us[i] for i in range(iterations))
    return float(max(comm.gather_objects(median)))
