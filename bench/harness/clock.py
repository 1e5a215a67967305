"""Times calls made from Python, with the same code for kccl and for every peer."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .problem import Array, Call

_BLOCKS = 20
_LONGEST_BLOCK = 25
_LIBC = ctypes.CDLL(None)
# Has three numbers about the calling thread: nanoseconds on a CPU, nanoseconds of waiting for a CPU
# while it could have run, and number of time slices.
_WAITED = Path("/proc/thread-self/schedstat")


def time_calls(call: Call, iterations: int, warmup: int) -> tuple[Array, Array]:
    """Times a function without arguments. Collective: every rank makes the same calls.

    Args:
        call: The function.
        iterations: Number of timed calls in each of the two passes.
        warmup: Number of untimed calls before the first pass; they also synchronize the ranks.

    Returns:
        Two arrays of microseconds per call. The first has the means of blocks of up to 25 calls;
        the clock is read once per block, so that its cost does not count. The second has single
        calls, for percentiles, with the cost of the clock subtracted.
    """
    now = time.perf_counter_ns
    block = max(1, min(_LONGEST_BLOCK, iterations // _BLOCKS))
    blocks = np.empty(max(1, iterations // block))
    singles = np.empty(iterations)
    calls = range(block)
    # Garbage collection is disabled, because its time would count as a call's latency.
    with uncollected():
        for _ in range(warmup):
            call()
        for i in range(blocks.size):
            start = now()
            for _ in calls:
                call()
            blocks[i] = now() - start
        for i in range(iterations):
            start = now()
            call()
            singles[i] = now() - start
    return blocks / (block * 1e3), np.maximum(singles - clock_cost_ns(), 0) / 1e3


def current_cpu() -> int | None:
    """Returns the logical CPU of the calling thread; None if the system does not tell."""
    cpu: int = _LIBC.sched_getcpu()
    return None if cpu < 0 else cpu


def waited_s() -> float:
    """Returns the seconds for which this thread was runnable but not running, since it began.

    Returns 0.0 on a kernel that does not count them (CONFIG_SCHED_INFO). The number of preemptions
    would say less, because even an idle machine's kernel often takes a core for microseconds.
    """
    try:
        return int(_WAITED.read_text().split()[1]) * 1e-9
    except FileNotFoundError:
        return 0.0


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection inside the context."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def clock_cost_ns() -> float:
    """Returns the median nanoseconds between two clock readings with nothing between them."""
    now = time.perf_counter_ns
    gaps = np.empty(200)
    for i in range(gaps.size):
        start = now()
        gaps[i] = now() - start
    return float(np.median(gaps))
