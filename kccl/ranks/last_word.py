"""A rank's message at the end of its program, so that the others do not wait for it in kccl.init().

Under mpirun the others cannot see that a rank's process ends: MPI_Finalize, which mpi4py calls
last, waits for all ranks, so the process stays.
"""

import atexit
import os
import sys

_is_prepared = _is_needed = False


def prepare() -> None:
    """Makes this process tell the other ranks at its end that it will not call kccl.init() again.

    A process that ends within kccl.init() sends no such message: it tells the others why it cannot
    start.
    """
    global _is_prepared, _is_needed
    _is_prepared = _is_needed = True
    atexit.register(_say)


def init_begins() -> None:
    """Notes that a call of kccl.init() has begun. If the process ends within it, the message is not
    needed: a rank that cannot start tells the others why.
    """
    global _is_needed
    _is_needed = False


def init_ends() -> None:
    """Notes that a call of kccl.init() has succeeded. The message is needed again, because the
    others may wait for this rank in another call.
    """
    global _is_needed
    _is_needed = _is_prepared


def _say() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if _is_needed and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        from .siblings import say_that_this_rank_ends

        say_that_this_rank_ends(os.environ)
