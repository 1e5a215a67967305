"""Lets another thread end a request that runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """Cancels one request. Any thread may call ask() at any time, before the request begins or
    while it runs. After the request's end, ask() has no effect.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_asked = False
        self._cancel: Callable[[], None] | None = None

    @property
    def is_asked(self) -> bool:
        """Tells whether ask() was called."""
        return self._is_asked

    def ask(self) -> None:
        """Cancels the request; if it has not begun, cancels it when it begins. Any thread may call
        this, and more than once.
        """
        with self._lock:
            is_first, self._is_asked = not self._is_asked, True
            # Called under the lock, so that the request cannot end meanwhile. Otherwise this could
            # cancel the next request, which runs on the same executors.
            if is_first and self._cancel is not None:
                self._cancel()

    @contextmanager
    def of(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Makes a context, in which the request must run.

        Args:
            cancel: A function that cancels the request. It is called at most once, on entry if
                ask() was called before.
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
