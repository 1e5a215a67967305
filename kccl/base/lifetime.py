"""What a fork and the end of the process do to the communicators that are open."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Ends(Protocol):
    """A communicator."""

    launcher: str

    def abort(self) -> None: ...

    def close(self) -> None: ...


# Communicator -> what disowns it in a forked child. It must not refer to the communicator.
_open: "weakref.WeakKeyDictionary[Any, Callable[[Any], None]]" = weakref.WeakKeyDictionary()
_has_hooks = False


def add(comm: Ends, disown: Callable[[Any], None]) -> None:
    """Watches over a communicator until discard()."""
    global _has_hooks
    if not _has_hooks:
        os.register_at_fork(after_in_child=_at_fork)
        # MPI_Finalize waits for all ranks. mpi4py calls it behind all hooks of atexit.
        atexit.register(_at_exit)
        _has_hooks = True
    _open[comm] = disown


def discard(comm: Ends) -> None:
    """Ends the watch over a communicator that is closed."""
    _open.pop(comm, None)


def _at_fork() -> None:
    for comm, disown in list(_open.items()):
        disown(comm)
    _open.clear()


def _at_exit() -> None:
    """Ends the peers' waits for this rank.

    Only under MPI: there MPI_Finalize keeps the process alive, so peers would not see its end.
    """
    has_raised = hasattr(sys, "last_value")  # an uncaught exception, which has been printed
    for comm in list(_open):
        if comm.launcher == "mpi":
            # Behind an error, calls of this rank on a GPU may still wait for peers.
            if has_raised:
                comm.abort()
            comm.close()
