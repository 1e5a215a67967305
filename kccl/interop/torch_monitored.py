"""Implements monitored_barrier through the store: rank 0 names the ranks that did not call it."""

import time
from datetime import timedelta

import torch.distributed as dist

from ..base import clock

_POLL_S = 0.002


def monitored_barrier(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Waits until all ranks have called it.

    Args:
        store: The group's store.
        rank, world_size: This rank in the group, and the size of the group.
        timeout: Most time to wait.
        wait_all_ranks: Rank 0 names all ranks that are missing, and not only the first.

    Raises:
        RuntimeError: A rank did not call it in time. On rank 0 the text names the missing ranks.
    """
    deadline = clock.now() + timeout.total_seconds()
    if rank:
        _follow(store, rank, deadline, timeout)
        return
    missing: list[int] = []
    for peer in range(1, world_size):
        if clock.now() > deadline and not missing:
            raise RuntimeError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {_milliseconds(timeout)} "
                f"ms, before it waited for rank {peer}"
            )
        key = f"monitored/{peer}"
        if _comes(store, key, deadline):
            # Deleted before the peer may continue, so that the next barrier does not find the key.
            store.delete_key(key)
            continue
        missing.append(peer)
        if not wait_all_ranks:
            break
    for peer in range(1, world_size):
        if peer not in missing:
            store.set(f"monitored/go/{peer}", "late" if missing else "go")
    if missing:
        names = ", ".join(map(str, missing))
        raise RuntimeError(
            f"[Rank 0]: {'Ranks' if wait_all_ranks else 'Rank'} {names} failed to pass "
            f"monitoredBarrier in {_milliseconds(timeout)} ms"
        )


def _follow(store: dist.Store, rank: int, deadline: float, timeout: timedelta) -> None:
    """Reports this rank to rank 0, waits for its answer, and deletes the keys of both.

    Raises:
        RuntimeError: Rank 0 misses a rank, or did not answer in time.
    """
    mine, go = f"monitored/{rank}", f"monitored/go/{rank}"
    store.set(mine, "here")
    # Rank 0 may begin up to one timeout later than this rank, and then waits for up to one timeout.
    came = _comes(store, go, deadline + timeout.total_seconds())
    answer = store.get(go).decode() if came else "absent"
    store.delete_key(mine)
    store.delete_key(go)
    if answer != "go":
        what = "misses ranks" if came else "did not come"
        raise RuntimeError(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received "
            f"errors while waiting for send/recv from rank 0, which {what} in "
            f"{_milliseconds(timeout)} ms. Please check rank 0 logs for faulty rank."
        )


def _comes(store: dist.Store, key: str, deadline: float) -> bool:
    """Waits for a key. Returns whether it came in time."""
    while not store.check([key]):
        if clock.now() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _milliseconds(timeout: timedelta) -> int:
    return round(timeout.total_seconds() * 1000)
