"""Work on large arrays in parts that stay in a core's cache, on several threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# The fewest parts for which threads are started, and the most threads.
_LEAST_SHARED, _MOST_THREADS = 16, 16


def in_parts(work: Callable[[int], object], size: int, at_once: int) -> None:
    """Calls work(first) for each part: first is 0, at_once, ... below size. Calls may happen at the
    same time.
    """
    starts = range(0, size, at_once)
    if len(starts) < _LEAST_SHARED:
        for first in starts:
            work(first)
        return
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        list(threads.map(work, starts))
