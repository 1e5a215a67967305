"""Makes, shares and closes the KCCL communicator behind a communicator of mpi4py.

The KCCL communicator is kept in an attribute (MPI_Comm_set_attr) of the MPI communicator. So all
Python objects of one MPI communicator find the same KCCL communicator, and Comm.Free() closes it.
"""

import atexit
import json
import os
import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from mpi4py import MPI

from ..backends.openers import most_ranks, opener
from ..base.env import read
from ..base.errors import Error
from ..comm import Communicator
from ..ranks import bootstrap, job
from ..ranks import mpi as progress
from ..start import join
from .mpi_errors import of_mpi

# MPI makes the first calls on each communicator. To make a communicator of KCCL costs as much time
# as KCCL saves in thousands of small calls. So a program with many communicators and few calls on
# each would be slower than with MPI.
_CALLS_BY_MPI = 8
# In effect no timeout, as in MPI.
_NO_LIMIT_S = 1e8
_MOST_CHARACTERS = 300

_env = read()
_is_logged = _env.mpi == "log"
_open: "weakref.WeakSet[Link]" = weakref.WeakSet()
# The process that has imported this module. Its forked children must not call MPI.
_pid = os.getpid()
# Communicators on which the program sends nothing. While a rank waits in KCCL, it calls MPI with
# the first of them, so that MPI makes progress.
_progress: list[Any] = []
# Classes of errors that MPI raises before it has begun a call, so that the call may be repeated.
_REFUSED = {
    MPI.ERR_ARG,
    MPI.ERR_BUFFER,
    MPI.ERR_COMM,
    MPI.ERR_COUNT,
    MPI.ERR_OP,
    MPI.ERR_RANK,
    MPI.ERR_ROOT,
    MPI.ERR_TYPE,
}


class Link:
    """A communicator of KCCL, with the ranks of a communicator of mpi4py.

    Attributes:
        comm: The communicator.
        rank, size: This rank, and the number of ranks.
        all_reduce and the others: The collectives of `comm`.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.world_size
        # A rank whose message is not contiguous passes bytes, while others may pass elements. So
        # KCCL must not compare the ranks' types.
        comm.context.compares_types = False
        # mpi4py refuses most of what is not contiguous, with an error of its own.
        comm.context.copies_strided = False
        self.all_reduce, self.reduce, self.scan = comm.all_reduce, comm.reduce, comm.scan
        self.broadcast, self.barrier = comm.broadcast, comm.barrier
        self.all_gather, self.gather, self.scatter = comm.all_gather, comm.gather, comm.scatter
        self.all_to_all, self.reduce_scatter = comm.all_to_all, comm.reduce_scatter
        self._said: set[tuple[str, str]] = set()
        _open.add(self)

    def judge(self, theirs: Any, error: Error) -> None:
        """Returns if `error` means that KCCL has refused the arguments of a call on this rank,
        which was made on the MPI communicator `theirs`.

        Then nothing was sent, and the caller may make the call in another way.

        Raises:
            MPI.Exception: The communicator has failed, or `error` is of another kind.
        """
        try:
            self.comm.check()
        except Error as failure:
            self.fail(theirs, failure)
        if not isinstance(error, ValueError):
            self.fail(theirs, error)

    def fail(self, theirs: Any, error: Error) -> None:
        """Calls the error handler of the MPI communicator, as MPI does, and then raises the error.

        `theirs` is the communicator. The handler may end the job.
        """
        made = of_mpi(error)
        theirs.Call_errhandler(int(made))
        raise made from error

    def say(self, call: str, why: str) -> None:
        """Logs, once for each call and reason, that MPI makes a call. Only if KCCL_MPI=log."""
        if _is_logged and (call, why) not in self._said:
            self._said.add((call, why))
            _log(self.rank, self.size, f"{call} by MPI: {why}")


class _State:
    """The state of a communicator of MPI, which is kept as its attribute.

    Attributes:
        calls: The number of calls that MPI has made, of those that KCCL can make.
        link: The Link that makes the calls. False if MPI makes all calls. None if this is not
            decided yet, so that MPI makes the calls for now.
    """

    __slots__ = ("calls", "link")

    def __init__(self) -> None:
        self.calls = 0
        self.link: Link | Literal[False] | None = None


def _ends(_comm: Any, _key: int, state: _State) -> None:
    if isinstance(state.link, Link):
        state.link.comm.close()
    state.link = False


_key = MPI.Comm.Create_keyval(delete_fn=_ends)


def link_of(theirs: Any) -> Link | Literal[False]:
    """Returns the Link that makes the calls of a communicator now, or False if MPI makes them.

    Raises:
        MPI.Exception: `theirs` is MPI.COMM_NULL, or was freed.
    """
    state: _State | None = theirs.Get_attr(_key)
    if state is None or state.link is None:
        return False
    # Cached in the object, so that its next call need not call this function.
    theirs._link = state.link
    return state.link


def count(theirs: Any) -> None:
    """Counts a call that MPI has made. The eighth one tries to open KCCL, which is collective.

    All ranks must count alike. They begin the same calls of MPI in the same order. So a call must
    be counted if MPI has begun it, even if it has failed: see has_begun().

    Raises:
        MPI.Exception: A rank has ended.
    """
    state: _State | None = theirs.Get_attr(_key)
    if state is None:
        state = _State()
        theirs.Set_attr(_key, state)
    state.calls += 1
    if state.link is None and state.calls >= _CALLS_BY_MPI:
        # If anything below fails, later calls on this rank must not try again: the other ranks
        # would not take part.
        state.link = False
        try:
            state.link, why = _opened(theirs)
        except Error as error:
            raise of_mpi(error) from error
        if why and theirs.Get_rank() == 0:
            # stacklevel 4 is the program's call. Below it on the stack are a method of Intracomm,
            # _by_mpi() and this function.
            warnings.warn(
                "kccl.interop.mpi leaves the calls of a communicator of "
                f"{theirs.Get_size()} ranks to MPI: {why}",
                RuntimeWarning,
                stacklevel=4,
            )


def has_begun(error: BaseException) -> bool:
    """Tells whether MPI had begun the call that raised an error.

    If wrong arguments were refused, the call has not begun, and the rank must call again to match
    the other ranks. MPI refuses arguments with errors of the classes _REFUSED, and mpi4py with
    exceptions that are not MPI.Exception. Any other error arose while ranks communicated, for
    example because their lengths differ. MPI may raise it on one rank only, but the call has ended
    on all ranks.
    """
    return isinstance(error, MPI.Exception) and error.Get_error_class() not in _REFUSED


def _opened(comm: Any) -> tuple[Link | Literal[False], str]:
    """Makes the communicator of KCCL on all ranks, or on none if one cannot. Collective.

    Returns:
        The Link, or False if MPI makes the calls; and the text of a warning, or "".
    """
    size = comm.Get_size()
    if size == 1:
        return False, ""
    env = _env
    if "KCCL_TIMEOUT" not in os.environ:
        env = replace(env, timeout=_NO_LIMIT_S)
    if "KCCL_FIRST_TIMEOUT" not in os.environ:
        env = replace(env, first_timeout=_NO_LIMIT_S)
    job_rank = bootstrap.detect(env, os.environ, comm)
    rank = job_rank.rank

    def agree(*mine: Any) -> list[Any]:
        """Returns the arguments that each rank has passed, in rank order. Collective."""
        text = json.dumps(mine)
        return [json.loads(each) for each in job_rank.exchange(text, env.first_timeout)]

    wish, wrong = _reason_for_mpi(size), _cannot_start()
    said = agree(job.machine_id(), _short(wish), _short(wrong))
    why = _first(text for _, text, _ in said)
    if len({machine for machine, _, _ in said}) > 1:
        why = "its ranks are on several machines"
    if why:
        _log(rank, size, f"all calls by MPI: {why}", only_rank_0=True)
        return False, ""
    why = _first(text for _, _, text in said)
    if why:
        return False, why
    made = None
    try:
        # KCCL_CHECK is switched off: it compares calls out of band, and in its waits MPI would make
        # no progress.
        made = join(
            job_rank,
            replace(env, check=0),
            lambda: opener("host", "of_process", job_rank.local_rank),
        )
    except Exception as error:
        # Catches any exception, because the other ranks must be told of it below.
        why = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        if not isinstance(error, Error):
            why += f" (rank {rank})"
    said = agree(_short(why), bool(_progress))
    why = next((text for text, _ in said if text), "")
    if not why and made is not None:
        if not all(has_progress for _, has_progress in said):
            _let_mpi_go_on(comm)
        _log(rank, size, "calls by KCCL", only_rank_0=True)
        return Link(made), ""
    if made is not None:
        made.close()
    return False, why


def _short(text: str) -> str:
    return text.encode("ascii", "replace").decode()[:_MOST_CHARACTERS]


def _first(texts: Iterable[str]) -> str:
    """Returns the first text that is not empty, with its rank's number; "" if all are empty."""
    return next((f"{text} (rank {rank})" for rank, text in enumerate(texts) if text), "")


def _cannot_start() -> str:
    """Returns why KCCL cannot start in this process, or "". Does not ask other ranks."""
    try:
        job.check_namespaces(_env.namespaces)
        job.claim(os.environ)
    except Exception as error:
        return str(error)
    return ""


def _reason_for_mpi(size: int) -> str:
    """Returns why MPI must make the calls of a communicator of `size` ranks, or "".

    For these reasons there is no warning.
    """
    if _env.mpi == "off":
        return "KCCL_MPI is off"
    if _env.ranks_per_node:
        return "KCCL_RANKS_PER_NODE is set, so its ranks are on several nodes"
    if size > most_ranks("host"):
        return f"it has more than {most_ranks('host')} ranks"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "MPI has a thread level below MPI_THREAD_MULTIPLE"
    return ""


def _log(rank: int, size: int, text: str, *, only_rank_0: bool = False) -> None:
    if _is_logged and (rank == 0 or not only_rank_0):
        where = f"communicator of {size} ranks, rank {rank}"
        print(f"kccl.interop.mpi: {where}: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _let_mpi_go_on(comm: Any) -> None:
    """Lets MPI make progress while this process waits in KCCL. Collective.

    Every rank makes a communicator, because Create() is collective. A rank that already makes
    progress with an earlier one does not use the new one.
    """
    # Create() and not Dup(), which would copy the program's attributes. The communicator is never
    # freed, because that is collective.
    _progress.append(MPI.Intracomm.Create(comm, comm.Get_group()))
    if len(_progress) == 1:
        progress.go_on_in_waits(MPI, _progress[0])


def _end_all(*_: Any) -> None:
    """Closes all KCCL communicators before MPI is finalized or Python exits. Idempotent."""
    if os.getpid() != _pid:
        return
    progress.leave_alone()
    for link in list(_open):
        link.comm.close()


# Registers _end_all() twice. MPI_Finalize first deletes the attributes of MPI.COMM_SELF, which
# covers a program that calls it. mpi4py calls it only after Python has ended; atexit covers that.
MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_end_all), True)
atexit.register(_end_all)
