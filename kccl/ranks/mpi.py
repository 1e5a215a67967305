"""Prepares MPI for use between nodes: makes an MPI communicator for KCCL's messages, and looks up
the addresses of MPI's functions for C.
"""

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..base import clock
from ..base.abi import ffi, lib
from ..base.errors import BackendError
from . import losses

_RETRY_S = 0.002
# The number of messages that meet() exchanges between two ranks. MPI may use another network for
# each message at first; two ranks have fewer networks than this between them, so all get connected.
_MEETINGS = 8
# Each KCCL communicator takes _TAGS tags of MPI: one for each channel, and other ones each time
# that it is cleared by reset().
CHANNELS: int = lib.kKcclMaxNodesChannels
_MOST_CLEARINGS = 1024
_TAGS = CHANNELS * _MOST_CLEARINGS


@dataclass(frozen=True)
class Functions:
    """The parts of MPI that C needs: addresses of functions, and handles as numbers.

    Attributes:
        isend, irecv, test, cancel, iprobe: Addresses of MPI_Isend and so on.
        comm, byte: The handles of a communicator and of MPI_BYTE, as numbers.
        handle_bytes: Bytes of a handle: those of an int (MPICH) or a pointer (Open MPI).
    """

    isend: int
    irecv: int
    test: int
    cancel: int
    iprobe: int
    comm: int
    byte: int
    handle_bytes: int


class _Opened:
    """The MPI of this process: the library, a communicator of all ranks, and the tags that are
    taken.
    """

    mpi: Any = None
    comm: Any = None
    # The communicator and request of an Idup() that timed out. They are kept alive, because MPI may
    # still write to them.
    unfinished: Any = None
    meetings: ClassVar[list[Any]] = []
    numbers = itertools.count()


def check_threads() -> None:
    """Raises BackendError unless MPI was initialized so that all threads may call it."""
    from mpi4py import MPI

    # A long call of KCCL releases the GIL, and another thread may then call MPI at the same time.
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendError(
            f"MPI has thread level {MPI.Query_thread()}, must have {MPI.THREAD_MULTIPLE} "
            "(MPI_THREAD_MULTIPLE): leave mpi4py.rc.thread_level as it is, or name it in "
            "MPI.Init_thread()"
        )


def open_comm(rank: int, timeout: float) -> None:
    """Makes a communicator for KCCL's messages. Collective. Does nothing if there is one already.

    Raises:
        Timeout: A rank did not come.
    """
    if _Opened.comm is not None:
        return
    from mpi4py import MPI

    comm, request = MPI.COMM_WORLD.Idup()
    deadline = clock.now() + timeout
    while not request.Test():
        if clock.now() > deadline:
            _Opened.unfinished = comm, request
            raise losses.absent(rank, None, by_mpi=True)
        time.sleep(_RETRY_S)
    # MPI's own errors are ignored: the connections between the ranks find failures.
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    _Opened.mpi, _Opened.comm = MPI, comm


def functions() -> Functions:
    """Returns the parts of MPI that C needs. open_comm() must have been called."""
    return _functions(_Opened.mpi, _Opened.comm)


def _functions(mpi: Any, comm: Any) -> Functions:
    library = ctypes.CDLL(mpi.__file__)  # also finds the functions of the MPI that mpi4py loaded

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    return Functions(
        isend=address("MPI_Isend"),
        irecv=address("MPI_Irecv"),
        test=address("MPI_Test"),
        cancel=address("MPI_Cancel"),
        iprobe=address("MPI_Iprobe"),
        # A handle of MPICH is an int, which may be negative.
        comm=mpi._handleof(comm) % 2**64,
        byte=mpi._handleof(mpi.BYTE) % 2**64,
        handle_bytes=mpi._sizeof(mpi.Comm),
    )


def go_on_in_waits(mpi: Any, comm: Any) -> None:
    """Lets MPI make progress whenever a rank of this process waits, until leave_alone().

    KCCL's waits then probe (MPI_Iprobe) for a message from the next rank of `comm`. They do not
    probe for one from this rank: MPICH would then look at this process's own messages only. A probe
    that finds a message makes no further progress, so nobody may send on `comm`.

    Args:
        mpi: The module mpi4py.MPI. All threads may call MPI.
        comm: A communicator of at least two ranks that has no messages. It must stay open.
    """
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    found = _functions(mpi, comm)
    probe = ffi.new("KcclNodes *")
    probe.iprobe, probe.comm, probe.handle_bytes = found.iprobe, found.comm, found.handle_bytes
    probe.mpi_rank[probe.rank] = (comm.Get_rank() + 1) % comm.Get_size()
    lib.kccl_host_let_mpi_go_on(probe)


def leave_alone() -> None:
    """Ends the calls of MPI that go_on_in_waits() began. Then MPI may be finalized."""
    lib.kccl_host_let_mpi_go_on(ffi.NULL)


def meet(
    peers: Sequence[int],
    tag: int,
    peer_tags: Sequence[int],
    deadline: float,
    look: Callable[[], None],
) -> bool:
    """Exchanges messages with ranks of other nodes, so that MPI connects them with this one.

    MPI connects two ranks when they send their first messages, perhaps once for each network. Both
    must call MPI for that. Afterwards it sends a short message at once.

    Args:
        peers: Ranks of MPI.COMM_WORLD, which make this call too.
        tag: The tag of messages to this rank.
        peer_tags: The tag of messages to each peer, in the order of `peers`.
        deadline: A value of clock.now().
        look: Called now and then. What it raises ends the wait.

    Returns:
        False at the deadline.
    """
    for _ in range(_MEETINGS):
        sent, received = bytearray(1), [bytearray(1) for _ in peers]
        requests = [
            _Opened.comm.Irecv(w, peer, tag) for w, peer in zip(received, peers, strict=True)
        ]
        requests += [
            _Opened.comm.Isend(sent, peer, its) for peer, its in zip(peers, peer_tags, strict=True)
        ]
        # MPI may write to these buffers even after a wait that failed. So _Opened.meetings keeps
        # them until all requests are complete.
        meeting = requests, sent, received
        _Opened.meetings.append(meeting)
        while not _Opened.mpi.Request.Testall(requests):
            if clock.now() > deadline:
                return False
            look()
            time.sleep(0)
        _Opened.meetings[:] = [each for each in _Opened.meetings if each is not meeting]
    return True


def new_number() -> int:
    """Returns a number for a new communicator; this process has not used the number before."""
    return next(_Opened.numbers)


def is_usable() -> bool:
    """Tells whether MPI may still be called."""
    return not _Opened.mpi.Is_finalized()


def first_tag(number: int, clearing: int) -> int:
    """Returns the tag of messages to a rank on channel 0 of a communicator.

    Args:
        number: The communicator's number in the rank's process: its new_number().
        clearing: How often the communicator was cleared. Earlier messages have other tags, so that
            nobody receives them afterwards.

    Raises:
        BackendError: MPI has no tags left.
    """
    if clearing >= _MOST_CLEARINGS:
        raise BackendError(
            f"a communicator that spans nodes can be reset {_MOST_CLEARINGS - 1} times, because "
            "each time takes tags of MPI: make another one"
        )
    tag = number * _TAGS + clearing * CHANNELS
    most = _Opened.comm.Get_attr(_Opened.mpi.TAG_UB)
    if tag + CHANNELS > most:
        raise BackendError(
            f"communicator number {number} of a process needs MPI's tag {tag}, and MPI has tags "
            f"up to {most}: make fewer communicators that span nodes"
        )
    return int(tag)
