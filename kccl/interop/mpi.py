"""All of mpi4py.MPI, with collectives by KCCL: a program changes one import.

    from kccl.interop import mpi as MPI

    comm = MPI.COMM_WORLD
    comm.Allreduce(MPI.IN_PLACE, x)

Every name of mpi4py.MPI is here. COMM_WORLD, COMM_SELF, and what their Split(), Dup(), Create() and
the like return are of this module's Intracomm, a subclass of mpi4py's. Cartesian, graph and
intercommunicators are mpi4py's own.

By KCCL: Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan, Exscan, Bcast, Allgather,
Allgatherv, Gather, Gatherv, Scatter, Scatterv, Alltoall, Alltoallv and Barrier, on communicators of
2 to 64 ranks of one machine, from the ninth call of one of these names on. Messages have mpi4py's
forms, MPI.IN_PLACE and derived datatypes too.

By MPI: all else, and these calls, because all ranks must choose alike and only this is known to all
of them: the number of elements, their basic types, the operator and the root.

- Reductions with a user's operator, MINLOC, MAXLOC, REPLACE, NO_OP, LAND, LOR and LXOR of integers,
  or elements that are no integers of 8 to 64 bits, floats, doubles, their complex numbers or
  booleans; Reduce_scatter without recvcounts.
- Gatherv, Scatterv and Alltoallv of more than 8 ranks; Alltoallw and the Neighbor_ calls.
- Send, Recv and the like. A receiver may wait for any rank and any tag, may post a longer buffer,
  and may probe; and MPI orders messages with those that a C library sends on the communicator.
- Calls that return a request, as Iallreduce: their progress is MPI's.
- The lower-case calls: pickling takes longer than what KCCL would gain.

In Gatherv, Scatterv and Alltoallv a rank knows its own lengths only. So all ranks take part in each
of them to its end, and a length that differs from its receiver's, longer or shorter, is an error.

Results are MPI's, but for floats: the last bits of a sum or product may differ, because the order
of the ranks does, and MPI does not say which of a NaN and a number MAX and MIN give. Buffers of a
call must not overlap, as in MPI. KCCL does not always find that, and then the result is undefined.

Errors are mpi4py's. What KCCL finds, as a lost rank, is an MPI.Exception and a kccl.Error. Waits
have no limit, as in MPI, unless KCCL_TIMEOUT or KCCL_FIRST_TIMEOUT is set. While a rank waits in
KCCL, MPI goes on, so that a message begun by Isend arrives. Needs MPI_THREAD_MULTIPLE, mpi4py's
default. KCCL_CHECK has no effect. KCCL_MPI=off leaves all calls to MPI; KCCL_MPI=log says on
standard error what KCCL makes, and why MPI makes a call. If KCCL cannot start on some rank, all
ranks use MPI for that communicator, and rank 0 warns.
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
