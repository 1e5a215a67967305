"""Measures floors: the least time in which the machine moves a cache line or copies bytes."""

import mmap
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

from ..base.abi import LINE_BYTES, ffi, lib
from ..base.errors import BackendError, InvalidArgument, Timeout
from ..comm import Communicator

if TYPE_CHECKING:
    from ..topology import Machine

__all__ = ["copy_us", "core_to_core_us", "one_way_latency_us", "probed"]

_ROUND_TRIPS = 20_000
_LIMIT_NS = 5_000_000_000
_COPY_BATCHES = 5
_PING_PONG_BATCHES = 20


def __dir__() -> list[str]:
    return __all__


def one_way_latency_us(comm: Communicator) -> float:
    """Measures the latency of one cache line from rank 0 to rank 1: half a round trip. Collective.

    If the two ranks share a core, this measures the scheduler and not the cache.

    Returns:
        Microseconds: the least of several batches of round trips, because a batch may be disturbed.
        0.0 for one rank.

    Raises:
        InvalidArgument: The windows are in GPU memory, which the host cannot poll.
        Timeout: A rank did not answer.
    """
    if comm.backend == "cuda":
        raise InvalidArgument('comm has backend "cuda", must have "host" or "sim"')
    if comm.world_size == 1:
        return 0.0
    window = comm.window(LINE_BYTES)
    result = None
    if comm.rank < 2:
        mine = ffi.cast("uint32_t *", window.addresses[comm.rank])
        theirs = ffi.cast("uint32_t *", window.addresses[1 - comm.rank])
        for _ in range(_PING_PONG_BATCHES):
            round_trips = _ROUND_TRIPS // _PING_PONG_BATCHES
            batch = lib.kccl_host_ping_pong(mine, theirs, round_trips, comm.rank == 0, _LIMIT_NS)
            result = batch if result is None else min(result, batch)
            if batch < 0:
                break
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
    """Returns the microseconds of one cache line from one logical CPU to another, one way.

    It pins two threads to the CPUs.

    Raises:
        Timeout: A thread did not answer: this process must not use its CPU, or other processes keep
            it busy.
    """
    one_way_ns = lib.kccl_host_core_ping_pong(cpu_a, cpu_b, _ROUND_TRIPS)
    if one_way_ns < 0:
        why = (
            "other processes keep them busy: end these, or probe again later"
            if {cpu_a, cpu_b} <= os.sched_getaffinity(0)
            else "this process must be allowed to use both"
        )
        raise Timeout(
            f"no answer between CPUs {cpu_a} and {cpu_b}: {why}",
            rank=0,
            collective="ping-pong",
        )
    return float(one_way_ns) * 1e-3


def probed(machine: "Machine", most: int | None) -> "Machine":
    """Returns the machine with measured latencies between at most `most` CPUs, or all if None.

    Shows a progress bar on a terminal.

    Raises:
        BackendError: The CPUs are too few, or one cannot be used.
    """
    from rich.progress import Progress

    from ..topology import core_to_core, spread
    from .screen import console, draws

    screen = console(sys.stderr)
    # The bar is drawn only between two ping-pongs, because a thread that redraws it would disturb
    # them.
    with Progress(
        console=screen, auto_refresh=False, transient=True, disable=not draws(screen)
    ) as bar:
        task = bar.add_task("core to core", total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        try:
            cpus = None if most is None else spread(machine, most)
            return core_to_core(machine, core_to_core_us, cpus, on_progress=on_progress)
        except ValueError as error:
            raise BackendError(f"cannot probe: {error}") from error


def copy_us(comm: Communicator, nbytes: int) -> float:
    """Measures the microseconds to copy `nbytes` bytes on all ranks at the same time. Collective.

    Returns:
        The least of several batches, because a batch may be disturbed. The time of a batch is the
        median of its copies on the slowest rank.
    """
    iterations = max(5, min(400, (1 << 24) // max(nbytes, 1)))
    us = ffi.new("double[]", iterations)
    # The target begins a whole number of pages plus half a page after the source. If both had the
    # same offset in a page, loads would be delayed by earlier stores to other pages (4K aliasing).
    memory: Any = ffi.from_buffer(bytearray(2 * nbytes + 3 * mmap.PAGESIZE))
    distance = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE // 2
    batches = []
    for _ in range(_COPY_BATCHES):
        comm.barrier()
        lib.kccl_host_copy(memory + distance, memory, nbytes, iterations, us)
        median = statistics.median(us[i] for i in range(iterations))
        batches.append(float(max(comm.gather_objects(median))))
    return min(batches)
