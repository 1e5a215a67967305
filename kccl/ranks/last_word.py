"""The message of a rank that ends, so that the others do not wait for it in kccl.init().

Under mpirun its process may not end: MPI_Finalize, which mpi4py calls last, waits for the others.
"""

import atexit
import os
import sys

_is_prepared = _is_needed = False


def prepare() -> None:
    """Arranges that this process tells the others at its end that it makes no further call of
    kccl.init(), unless it ends within one.
    """
    global _is_prepared, _is_needed
    _is_prepared = _is_needed = True
    atexit.register(_say)


def init_begins() -> None:
    """Notes that the ranks meet in a call of kccl.init(), where each tells why it cannot start."""
    global _is_needed
    _is_needed = False


def init_ends() -> None:
    """Notes that the ranks have met. They may meet again, in another call."""
    global _is_needed
    _is_needed = _is_prepared


def _say() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if _is_needed and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        from .siblings import say_that_this_rank_ends

        say_that_this_rank_ends(os.environ)
