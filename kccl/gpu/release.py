"""Gives back to the driver what nobody owns any more, in threads of its own.

Any thread may run a destructor. Suppose that the destructor waited for the device while a kernel on
it waits for this thread's next call: neither would go on. So threads of this module wait and free.

Each device has a thread, which waits for that device only. So freeing what one rank has dropped
does not wait for the GPU of another rank. If kernels of several devices may use the memory, the job
of freeing it goes from thread to thread.
"""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from ..base.errors import BackendError
from . import driver

Calls = tuple[tuple[str, tuple[Any, ...]], ...]
"""Functions, by the driver's names from table().names, and their arguments."""

_DRAIN_S = 10.0


class _Job:
    """A call to make once an owner is dropped and the kernels of some devices have ended.

    Attributes:
        where: The device in whose thread the call is made.
        waits_for: The devices that are still to be waited for, in order.
        is_over: Set when the call has been made, and what it refers to was dropped.
    """

    def __init__(
        self, where: driver.Device, users: Sequence[driver.Device], call: Callable[[], None]
    ) -> None:
        self.where = where
        self.waits_for: list[driver.Device] = []
        self.is_over = threading.Event()
        self._users = users
        self._call: Callable[[], None] | None = call
        self._pid = os.getpid()

    def begin(self) -> None:
        """Gives the job to its device's thread. Does nothing in a fork, which has no context."""
        if os.getpid() == self._pid:
            self.waits_for = [*self._users]
            _under_way[self] = None
            _jobs_of(self.where.ordinal, self._pid).put(self)

    def go_on(self, ordinal: int) -> None:
        """Does the job's work in the thread of a device, and gives the job to the next thread."""
        is_over = True
        try:
            is_over = self._step(ordinal)
        except BackendError:
            # The error is dropped: no caller is left that could get it.
            pass
        finally:
            if is_over:
                # Dropping the call may drop another owner, whose job must begin before this job is
                # over: so drain() waits for it too.
                self._call = None
                _under_way.pop(self, None)
                self.is_over.set()

    def _step(self, ordinal: int) -> bool:
        """Waits for this thread's device if the job must. Then gives the job to the next device's
        thread and returns False, or, if no device is left, makes the call and returns True.
        """
        while self.waits_for and self.waits_for[0].ordinal == ordinal:
            gpu = driver.table()
            with self.waits_for[0].current():
                gpu.attempt(gpu.names.synchronize_device)
            del self.waits_for[0]
        following = (self.waits_for or [self.where])[0].ordinal
        if following != ordinal:
            _jobs_of(following, self._pid).put(self)
            return False
        assert self._call is not None
        self._call()
        return True

    def is_due(self, where: driver.Device | None) -> bool:
        """Tells whether drain() waits for the job. In a fork, jobs of the parent never end."""
        devices = (self.where, *self.waits_for)
        is_alone = where is None or all(each.ordinal == where.ordinal for each in devices)
        return is_alone and os.getpid() == self._pid


# The jobs that have begun. No lock protects them, because a destructor may run at any moment.
_under_way: dict[_Job, None] = {}


def at_end(
    owner: object, where: driver.Device, calls: Calls, users: Sequence[driver.Device]
) -> "weakref.finalize[..., Any]":
    """Makes calls of the driver when `owner` is garbage-collected, but not at the process's end.

    Args:
        owner: The owner of what the calls release.
        where: The device that is made current for the calls, in whose thread they are made.
        calls: The calls, in order.
        users: The devices of this process whose kernels may use what the calls release. They are
            waited for first. The caller may change the list until `owner` is collected.

    Returns:
        The finalizer, whose detach() cancels the calls.
    """
    return later(owner, where, partial(undo, where, calls, os.getpid()), users)


def later(
    owner: object,
    where: driver.Device,
    call: Callable[[], None],
    users: Sequence[driver.Device] = (),
) -> "weakref.finalize[..., Any]":
    """Makes a call in a device's thread when `owner` is garbage-collected, not at the process's
    end.

    Args:
        owner, where, users: See at_end().
        call: The call.

    Returns:
        The finalizer, whose detach() cancels the calls.
    """
    # Starts the device's thread now, because a destructor should not.
    _jobs_of(where.ordinal, os.getpid())
    finalizer = weakref.finalize(owner, _Job(where, users, call).begin)
    finalizer.atexit = False
    return finalizer


def undo(where: driver.Device, calls: Calls, pid: int) -> None:
    """Makes calls now and ignores their results. Does nothing in a fork of process `pid`.

    Raises:
        BackendError: The device cannot be made current.
    """
    # A forked child has no context of the driver.
    if os.getpid() != pid:
        return
    # uncaptured() keeps the calls from ending a capture. This is safe, because no kernel uses what
    # they release.
    with where.current(), driver.uncaptured():
        for name, args in calls:
            driver.table().attempt(name, *args)


def drain(where: driver.Device | None = None) -> None:
    """Does what driver.drain() does.

    Args:
        where: Waits only for releases on this device that wait for no other device; None for all.
    """
    deadline = time.monotonic() + _DRAIN_S
    while jobs := [each for each in list(_under_way) if each.is_due(where)]:
        if not jobs[0].is_over.wait(max(deadline - time.monotonic(), 0)):
            return


driver.drains.append(drain)


@cache
def _jobs_of(ordinal: int, _pid: int) -> "queue.SimpleQueue[_Job]":
    jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    name = f"kccl-release {ordinal}"
    threading.Thread(target=_release, args=(ordinal, jobs), name=name, daemon=True).start()
    return jobs


def _release(ordinal: int, jobs: "queue.SimpleQueue[_Job]") -> None:
    while True:
        try:
            jobs.get().go_on(ordinal)
        except Exception as error:
            # Reports the error by threading.excepthook, as if it had ended the thread. But the
            # thread goes on with later jobs.
            told = type(error), error, error.__traceback__, threading.current_thread()
            # Ignores errors of the hook, which may be the program's own.
            with contextlib.suppress(Exception):
                threading.excepthook(threading.ExceptHookArgs(told))
            del told
