"""What a rank says when it ends without kccl.init(), so that the others do not wait for it.

Under mpirun its process may not end: MPI_Finalize, which mpi4py calls last, waits for the others.
"""

import atexit
import os
import sys

is_needed = False
"""Whether this process may still have to say that it will not call kccl.init()."""


def prepare() -> None:
    """Says it at the end of this process, unless kccl.init() is called before."""
    global is_needed
    is_needed = True
    atexit.register(_say)


def _say() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if is_needed and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        from .siblings import say_that_this_rank_ends

        say_that_this_rank_ends(os.environ)
