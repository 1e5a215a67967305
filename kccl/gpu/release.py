"""Gives back to the driver what nobody owns any more, in a thread of its own.

Any thread may run a destructor. Suppose that it waited for its device while a kernel there waits
for this thread's next call: neither would go on. So a thread of this module waits and frees.
"""

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from ..base.errors import BackendError
from . import driver

Calls = tuple[tuple[str, tuple[Any, ...]], ...]
"""Functions, by the driver's names from table().names, and their arguments."""

# The function that the thread calls.
_dropped: queue.SimpleQueue[Callable[[], None]]
_dropped = queue.SimpleQueue()
_DRAIN_S = 10.0


def at_end(
    owner: object,
    where: driver.Device,
    calls: Calls,
    *,
    waits: bool = True,
    users: Sequence[driver.Device] = (),
) -> "weakref.finalize[..., Any]":
    """Makes the calls when `owner` is collected; at the end of the process there is no need.

    Args:
        owner: The owner of what the calls release.
        where: The device.
        calls: In order.
        waits: Wait for the device first, because kernels may still use what is released.
        users: Other devices of this process whose kernels may use it; waited for, too. The caller
            may add some later.

    Returns:
        What detach() cancels.
    """
    return later(owner, undo, where, calls, os.getpid(), waits, users)


def later(owner: object, function: Callable[..., None], *args: Any) -> "weakref.finalize[..., Any]":
    """Makes a call in this module's thread when `owner` is collected; not at the process's end.

    Returns:
        What detach() cancels.
    """
    _start_releasing(os.getpid())
    call = weakref.finalize(owner, _dropped.put, partial(function, *args))
    call.atexit = False
    return call


def undo(
    where: driver.Device,
    calls: Calls,
    pid: int,
    waits: bool = True,
    users: Sequence[driver.Device] = (),
) -> None:
    """Makes the calls now and ignores what they return; nothing in a fork of process `pid`.

    Raises:
        BackendError: The device cannot be made current.
    """
    # A fork has no context.
    if os.getpid() != pid:
        return
    gpu = driver.table()
    for other in users:
        with other.current():
            gpu.attempt(gpu.names.synchronize_device)
    with where.current():
        if waits:
            gpu.attempt(gpu.names.synchronize_device)
        # Calls that need not wait need not end a capture either.
        with contextlib.nullcontext() if waits else driver.uncaptured():
            for name, args in calls:
                gpu.attempt(name, *args)


def drain() -> None:
    """See driver.drain()."""
    _start_releasing(os.getpid())
    is_drained = threading.Event()
    _dropped.put(is_drained.set)
    is_drained.wait(_DRAIN_S)


driver.drains.append(drain)


@cache
def _start_releasing(_pid: int) -> None:
    threading.Thread(target=_release, name="kccl-release", daemon=True).start()


def _release() -> None:
    while True:
        call = _dropped.get()
        # There is nobody to tell of an error.
        with contextlib.suppress(BackendError):
            call()
        # References are dropped before the thread waits for the next function.
        del call
