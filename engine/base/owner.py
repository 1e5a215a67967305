"""Checks that an engine is used only by the process that opened it, not by a fork."""

import os

import kccl


class Owner:
    """Remembers the process that opened an engine. A fork of this process must not use the engine:
    the fork has none of the engine's threads, but its copy of the engine shares memory with them.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Tells whether this process made the object."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises kccl.Error if this process is a fork of the one that made the object."""
        if not self.is_here:
            raise kccl.Error(
                f"this process is a fork of process {self._pid}, which opened the engine; only "
                "that process may use it: open an Engine in each process"
            )
