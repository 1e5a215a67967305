"""Divides work on large arrays into parts that fit into a core's cache, for several threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# With fewer than _LEAST_SHARED parts no threads are started. At most _MOST_THREADS are.
_LEAST_SHARED, _MOST_THREADS = 16, 16


def in_parts(work: Callable[[int], object], size: int, at_once: int) -> None:
    """Calls work(first) for first = 0, at_once, 2 * at_once, ... below size. work() may be called
    by several threads at the same time. Returns when all calls have returned.
    """
    starts = range(0, size, at_once)
    if len(starts) < _LEAST_SHARED:
        for first in starts:
            work(first)
        return
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        list(threads.map(work, starts))
