"""Replaces mpi4py.MPI: it has all of its names, and KCCL makes the collectives.

A program changes one import:

    from kccl.interop import mpi as MPI

    comm = MPI.COMM_WORLD
    comm.Allreduce(MPI.IN_PLACE, x)

Every name of mpi4py.MPI is here. COMM_WORLD, COMM_SELF, and what their Split(), Dup(), Create() and
the like return are of this module's Intracomm, a subclass of mpi4py's. Cartesian, graph and
intercommunicators are mpi4py's own.

KCCL makes the calls Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan, Exscan, Bcast,
Allgather, Allgatherv, Gather, Gatherv, Scatter, Scatterv, Alltoall, Alltoallv and Barrier, on
communicators of 2 to 64 ranks of one machine. MPI makes the first eight of these calls on each
communicator. Messages have all of mpi4py's forms, including MPI.IN_PLACE and derived datatypes.

MPI makes everything else, and the calls in the list below. All ranks must choose between KCCL and
MPI alike, and all ranks know only the number of elements, their basic types, the operator and the
root.

- Reductions with a user's operator, MINLOC, MAXLOC, REPLACE or NO_OP; or with LAND, LOR or LXOR of
  integers; or of elements other than integers of 8 to 64 bits, floats, doubles, their complex
  numbers and booleans. Also Reduce_scatter without recvcounts.
- Gatherv, Scatterv and Alltoallv of more than 8 ranks; Alltoallw and the Neighbor_ calls.
- Send, Recv and the other point-to-point calls. A receiver may wait for any rank and any tag, may
  post a longer buffer, and may probe. And only MPI can order these messages with those that a C
  library sends on the communicator.
- Calls that return a request, as Iallreduce: only MPI makes their progress.
- The lower-case calls: pickling takes longer than what KCCL would gain.

In Gatherv, Scatterv and Alltoallv a rank knows only its own lengths. So no rank leaves such a call
early, and it is an error if a rank sends more or fewer bytes than the receiver expects.

Results are those of MPI, except for floats. The last bits of a sum or product may differ, because
KCCL adds the ranks in another order. And MPI does not define whether MAX and MIN of a NaN and a
number return the NaN. Buffers of a call must not overlap, as in MPI. KCCL does not always detect
that they do, and then the result is undefined.

Errors are mpi4py's. An error that KCCL finds, as a lost rank, is an MPI.Exception and a kccl.Error.
Waits have no timeout, as in MPI, unless KCCL_TIMEOUT or KCCL_FIRST_TIMEOUT is set. While a rank
waits in KCCL, MPI makes progress, so that a message begun by Isend arrives. MPI_THREAD_MULTIPLE is
needed, which is mpi4py's default. KCCL_CHECK has no effect. KCCL_MPI=off leaves all calls to MPI.
KCCL_MPI=log prints on standard error for which communicators KCCL makes the calls, and why MPI
makes a call. If KCCL cannot start on a rank, all ranks use MPI for that communicator, and rank 0
warns.
"""

from ..base.extras import missing as _missing

try:
    from .mpi_communicator import NAMES
except ImportError as error:
    raise ImportError(_missing(error), name=error.name) from error

__all__ = sorted(name for name in NAMES if not name.startswith("_"))

globals().update(NAMES)
del NAMES


def __dir__() -> list[str]:
    return __all__
