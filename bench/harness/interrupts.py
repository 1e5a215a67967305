"""Ctrl-C within a run: the first one ends it, and what was measured is still written."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Inside the context, the first SIGINT or SIGTERM raises KeyboardInterrupt; those after it, or
    after hold(), raise nothing, so that they cannot end the writing of results.

    Attributes:
        number: The signal that came; None if none has.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._raises = True
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        # A rank that is a thread hears of it through its failing waits.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def hold(self) -> None:
        """From now on signals raise nothing."""
        self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raises, self._raises = self._raises, False
        self.number = self.number or number
        if raises:
            raise KeyboardInterrupt
