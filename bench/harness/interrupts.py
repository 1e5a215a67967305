"""Handles Ctrl-C during a run: the first one ends it, and the rows so far are still written."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Makes the first SIGINT or SIGTERM inside the context raise KeyboardInterrupt. Later signals,
    and all after hold(), raise nothing, so that they cannot interrupt the writing of results.

    If ranks are threads, each has its own object, and the main thread has one around them. The main
    thread gets the signal. The ranks notice it because their waits fail.
    """

    # The object that the main thread has entered. Its handler gets the signals of the process.
    _main: Interrupts | None = None

    def __init__(self) -> None:
        self._number: int | None = None
        self._raises = True
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            Interrupts._main = self
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if Interrupts._main is self:
            Interrupts._main = None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def number(self) -> int | None:
        """The number of the signal that came; None if none has come."""
        main = Interrupts._main
        return self._number if main is None else main._number

    def hold(self) -> None:
        """Makes later signals raise nothing."""
        self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raises, self._raises = self._raises, False
        self._number = self._number or number
        if raises:
            raise KeyboardInterrupt
