"""Lets another thread end a request that runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """A wish that one request end. Any thread may ask at any time: before the request begins and
    while it runs. Behind the request's end nothing happens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_asked = False
        self._cancel: Callable[[], None] | None = None

    @property
    def is_asked(self) -> bool:
        """Tells whether the end was asked for."""
        return self._is_asked

    def ask(self) -> None:
        """Asks for the end. May be called again, by any thread."""
        with self._lock:
            is_first, self._is_asked = not self._is_asked, True
            # This holds the lock, because the next request has the same executors and must not be
            # cancelled.
            if is_first and self._cancel is not None:
                self._cancel()

    @contextmanager
    def of(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A context in which the request runs.

        Args:
            cancel: Ends the request. Called at most once; at once if the end was asked for before.
        """
        with self._lock:
            self._cancel = cancel
            if self._is_asked:
                cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None
