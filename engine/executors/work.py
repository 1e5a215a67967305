"""Runs the part of a request that needs a thread of its own, because it waits for kernels."""

import math
import threading
import time
from collections.abc import Callable


class Work:
    """Runs pieces of work in a thread of its own, at most one at a time.

    Attributes:
        seconds: How many seconds the last piece of work took. NaN before the first.
        has_failed: Whether the last piece has raised an error that join() has not raised yet.
    """

    def __init__(self) -> None:
        self.seconds = math.nan
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begins a piece of work in a new thread. join() must have been called for the last one."""

        def run() -> None:
            began = time.monotonic()
            try:
                work()
            except BaseException as error:
                self._failure = error
            self.seconds = time.monotonic() - began

        self._thread = threading.Thread(target=run, name="kccl decode")
        self._thread.start()

    def join(self) -> None:
        """Waits until the piece of work has ended, and raises its error if it failed. Returns at
        once if no work was started.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
