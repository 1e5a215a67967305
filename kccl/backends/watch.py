"""Watches the peers' processes, so that waiting kernels hear that one has ended."""

import os
import select
import threading
from collections.abc import Callable


class Watcher:
    """A thread that sleeps until a process ends."""

    def __init__(self, pidfds: dict[int, int], on_end: Callable[[int], None]) -> None:
        """Begins.

        Args:
            pidfds: By rank; negative: a thread of this process. They stay the caller's.
            on_end: Called with the rank, in the thread.
        """
        self._ranks = {os.dup(fd): rank for rank, fd in pidfds.items() if fd >= 0}
        self._on_end = on_end
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="kccl watcher", daemon=True)
        if self._ranks:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        if self._stop < 0:
            return
        os.close(self._stop)
        self._stop = -1
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for fd in (self._wake, *self._ranks):
            os.close(fd)

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (self._wake, *self._ranks):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    return
                poll.unregister(fd)
                self._on_end(self._ranks[fd])
