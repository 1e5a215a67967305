"""What the driver gave and nobody owns any more goes back to it, by a thread of its own.

Any thread may be the one that collects, also the one that a kernel of another rank is waiting for;
so none of them waits for a device.
"""

import contextlib
import os
import queue
import threading
import weakref
from functools import cache
from typing import Any

from ..base.errors import BackendError
from . import driver

Calls = tuple[tuple[str, tuple[Any, ...]], ...]
"""Functions of the driver and their arguments."""

# (device, calls, process, whether the device is waited for first).
_dropped: queue.SimpleQueue[tuple[driver.Device, Calls, int, bool] | threading.Event]
_dropped = queue.SimpleQueue()
_DRAIN_S = 10.0


def at_end(owner: object, where: driver.Device, calls: Calls, *, waits: bool = True) -> None:
    """Makes the calls when `owner` is collected; the end of the process needs none.

    Args:
        owner: Of what they release.
        where: The device.
        calls: To make, in order.
        waits: What was launched may still use it, so the device is waited for.
    """
    _start_releasing(os.getpid())
    weakref.finalize(owner, _dropped.put, (where, calls, os.getpid(), waits)).atexit = False


def undo(where: driver.Device, calls: Calls, pid: int, waits: bool = True) -> None:
    """Makes the calls now, whatever they return; in a fork of process `pid`, which has no context,
    none.
    """
    if os.getpid() != pid:
        return
    driver.attempt("cuCtxPushCurrent", where.context)
    try:
        if waits:
            driver.attempt("cuCtxSynchronize")
        # What need not wait need not end a capture either.
        with contextlib.nullcontext() if waits else driver.uncaptured():
            for name, args in calls:
                driver.attempt(name, *args)
    finally:
        driver.attempt("cuCtxPopCurrent")


def drain() -> None:
    """See gpu.drain()."""
    _start_releasing(os.getpid())
    is_drained = threading.Event()
    _dropped.put(is_drained)
    is_drained.wait(_DRAIN_S)


driver.drains.append(drain)


@cache
def _start_releasing(_pid: int) -> None:
    threading.Thread(target=_release, name="kccl-release", daemon=True).start()


def _release() -> None:
    while True:
        item = _dropped.get()
        if isinstance(item, threading.Event):
            item.set()
            continue
        # Nobody hears of an error here.
        with contextlib.suppress(BackendError):
            undo(*item)
