"""Watches the peers' processes, so that waiting kernels are told when one has ended."""

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable


class Watcher:
    """A thread that sleeps until a process ends.

    The thread ends with stop(), or when the watcher is garbage-collected. It refers neither to the
    watcher nor to the object whose method `on_end` is, so it keeps neither of them alive.
    """

    def __init__(
        self,
        pidfds: dict[int, int],
        on_end: Callable[[int], None],
        end_event: int = select.POLLIN,
    ) -> None:
        """Starts the thread, if there is a process to watch.

        Args:
            pidfds: Rank -> pidfd of its process; negative for a thread of this process. The watcher
                duplicates them, and the caller closes these.
            on_end: A bound method. The thread calls it with the rank whose process has ended.
            end_event: What poll() reports of a descriptor when the process has ended.
        """
        self._thread: threading.Thread | None = None
        ranks = {os.dup(fd): rank for rank, fd in pidfds.items() if fd >= 0}
        if not ranks:
            return
        wake, stop = os.pipe()
        self._end = weakref.finalize(self, _wake_up, stop, os.getpid())
        self._end.atexit = False
        self._thread = threading.Thread(
            target=_watch,
            args=(wake, ranks, weakref.WeakMethod(on_end), end_event),
            name="kccl watcher",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        if self._thread is None:
            return
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _wake_up(stop: int, pid: int) -> None:
    # Wakes the thread by a byte. Closing this end of the pipe might not wake it, because a fork of
    # this process may have a copy of the end. A fork itself writes nothing: the thread belongs to
    # process `pid`.
    if os.getpid() == pid:
        with contextlib.suppress(BrokenPipeError):
            os.write(stop, b"\0")
    os.close(stop)


def _watch(
    wake: int,
    ranks: dict[int, int],
    on_end: "weakref.WeakMethod[Callable[[int], None]]",
    end_event: int,
) -> None:
    """Calls on_end() for each process that ends. Runs in the thread.

    Args:
        wake: The read end of a pipe. The thread ends when a byte has come.
        ranks: Descriptor of a process -> rank. The thread closes these and `wake`.
        on_end: Weak reference to the method.
        end_event: As in Watcher.
    """
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    for fd in ranks:
        poll.register(fd, end_event)
    try:
        while True:
            for fd, _ in poll.poll():
                method = on_end()
                if fd == wake or method is None:
                    return
                poll.unregister(fd)
                method(ranks[fd])
                del method
    finally:
        for fd in (wake, *ranks):
            os.close(fd)
