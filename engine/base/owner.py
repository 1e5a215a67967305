"""Knows the process that opened an engine."""

import os

import kccl


class Owner:
    """The process that has made this object. A fork of it has none of the engine's threads, and
    shares memory with it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Tells whether this process is the one."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises kccl.Error in a fork."""
        if not self.is_here:
            raise kccl.Error(
                f"this process is a fork of process {self._pid}, which opened the engine; only "
                "that process may use it: open an Engine in each process"
            )
