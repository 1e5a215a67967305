"""Ctrl-C within a run: the first one ends it, and what was measured is still written."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Inside the context, the first SIGINT or SIGTERM raises KeyboardInterrupt; those after it, or
    after hold(), raise nothing, so that they cannot end the writing of results.

    Ranks that are threads have one each, and hear of the signal by their waits, which fail; the
    main thread, which gets it, has one around them.
    """

    # That of the main thread, which gets the signals.
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
        """The signal that came; None if none has."""
        main = Interrupts._main
        return self._number if main is None else main._number

    def hold(self) -> None:
        """From now on signals raise nothing."""
        self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raises, self._raises = self._raises, False
        self._number = self._number or number
        if raises:
            raise KeyboardInterrupt
