"""Ends open communicators at a fork, and at the end of the process."""

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


Step = Callable[[Any], None]
"""What a forked child does to a communicator. The function must not refer to one, or it would never
be garbage-collected.
"""

_open: "weakref.WeakKeyDictionary[Any, tuple[Step, Step]]" = weakref.WeakKeyDictionary()
_has_hooks = False


def add(comm: Ends, refuse: Step, release: Step) -> None:
    """Arranges what happens to a communicator at a fork and at the process's end, until discard().

    Args:
        comm: The communicator.
        refuse: Called in a forked child. It makes every use of the communicator an error.
        release: Called in a forked child after `refuse` of all communicators. It closes the
            descriptors. Closing one communicator may end another one, which then must know that it
            may not tell the parent's peers.
    """
    global _has_hooks
    if not _has_hooks:
        os.register_at_fork(after_in_child=_at_fork)
        # MPI_Finalize waits for all ranks, so the communicators must be closed before it. mpi4py
        # calls it after all hooks of atexit.
        atexit.register(_at_exit)
        _has_hooks = True
    _open[comm] = refuse, release


def discard(comm: Ends) -> None:
    """Ends what add() has arranged for a communicator, because it is closed."""
    _open.pop(comm, None)


def _at_fork() -> None:
    found = list(_open.items())
    for comm, (refuse, _) in found:
        refuse(comm)
    for comm, (_, release) in found:
        release(comm)
    _open.clear()


def _at_exit() -> None:
    """Ends the peers' waits for this rank.

    Only under MPI: there MPI_Finalize keeps the process alive, so peers would not see its end.
    """
    has_raised = hasattr(sys, "last_value")  # an uncaught exception, which has been printed
    for comm in list(_open):
        if comm.launcher != "mpi":
            continue
        try:
            # The program ends with an error. Calls of this rank on a GPU may still wait for peers,
            # and close() would wait for these calls, so abort() ends them first.
            if has_raised:
                comm.abort()
            comm.close()
        except Exception:  # the others must be closed too
            sys.excepthook(*sys.exc_info())
