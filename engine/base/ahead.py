"""Calls functions ahead of time, in threads, and gives their results in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(
    calls: Iterable[tuple[Callable[[], T], int]], threads: int, most_bytes: int
) -> Generator[T, None, None]:
    """Yields what functions return, in their order. Threads call the next ones meanwhile.

    Args:
        calls: The functions, each with the bytes that its result takes.
        threads: How many functions may run at the same time.
        most_bytes: The most bytes of results that are made ahead. One result may have more.
    """
    waiting: deque[tuple[Future[T], int]] = deque()
    held = 0
    with ThreadPoolExecutor(threads, "kccl ahead") as pool:
        try:
            for call, nbytes in calls:
                while waiting and (len(waiting) > threads or held + nbytes > most_bytes):
                    first, freed = waiting.popleft()
                    yield first.result()
                    # Or this frame would hold the result until the next one is there.
                    del first
                    held -= freed
                waiting.append((pool.submit(call), nbytes))
                held += nbytes
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for each, _ in waiting:
                each.cancel()
