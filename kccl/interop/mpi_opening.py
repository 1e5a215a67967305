"""The communicator of KCCL behind a communicator of mpi4py: when it is made, shared and closed.

An attribute of MPI has it. So all Python objects of one communicator of MPI find the same one, and
MPI closes it in Comm.Free().
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

# A communicator of KCCL takes as long to make as thousands of small calls gain. A program that
# makes a few calls on each of many communicators is to be no slower than by MPI.
_CALLS_BY_MPI = 8
# MPI's waits have no limit.
_NO_LIMIT_S = 1e8
_MOST_CHARACTERS = 300

_env = read()
_is_logged = _env.mpi == "log"
_open: "weakref.WeakSet[Link]" = weakref.WeakSet()
# The process that has imported this module. Its forks may not call MPI.
_pid = os.getpid()
# Communicators without messages. By the first of them MPI goes on in waits.
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
        all_reduce and the others: Its collectives.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.world_size
        # Where a rank's message is not in one piece, its bytes are moved, and the others' elements.
        comm.context.compares_types = False
        self.all_reduce, self.reduce, self.scan = comm.all_reduce, comm.reduce, comm.scan
        self.broadcast, self.barrier = comm.broadcast, comm.barrier
        self.all_gather, self.gather, self.scatter = comm.all_gather, comm.gather, comm.scatter
        self.all_to_all, self.reduce_scatter = comm.all_to_all, comm.reduce_scatter
        self._said: set[tuple[str, str]] = set()
        _open.add(self)

    def judge(self, theirs: Any, error: Error) -> None:
        """Returns if a call of KCCL has refused its arguments, so that nothing was sent.

        Raises:
            MPI.Exception: The communicator has failed.
        """
        try:
            self.comm.check()
        except Error as failure:
            self.fail(theirs, failure)
        if not isinstance(error, ValueError):
            self.fail(theirs, error)

    def fail(self, theirs: Any, error: Error) -> None:
        """Raises an error as MPI does: the communicator's error handler has its say first."""
        made = of_mpi(error)
        theirs.Call_errhandler(int(made))
        raise made from error

    def say(self, call: str, why: str) -> None:
        """Notes, once a reason, that MPI makes a call."""
        if _is_logged and (call, why) not in self._said:
            self._said.add((call, why))
            _log(self.rank, self.size, f"{call} by MPI: {why}")


class _State:
    """What is known of a communicator of MPI.

    Attributes:
        calls: How many of the calls that KCCL might have made were made.
        link: False: MPI makes all calls. None: this is not decided yet.
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
    """Returns what makes the calls now: a Link, or False for MPI.

    Raises:
        MPI.Exception: The communicator is none.
    """
    state: _State | None = theirs.Get_attr(_key)
    if state is None or state.link is None:
        return False
    # The next call need not come here.
    theirs._link = state.link
    return state.link


def count(theirs: Any) -> None:
    """Notes that MPI has made a call, and decides after some of them. Collective then.

    All ranks must count alike, and they make the same calls of MPI, in the same order. So a call
    counts where MPI has begun it, whatever came of it: see has_begun().

    Raises:
        MPI.Exception: A rank has ended, or did.
    """
    state: _State | None = theirs.Get_attr(_key)
    if state is None:
        state = _State()
        theirs.Set_attr(_key, state)
    state.calls += 1
    if state.link is None and state.calls >= _CALLS_BY_MPI:
        # Whatever fails from here on, no later call may try again without the others.
        state.link = False
        try:
            state.link, why = _opened(theirs)
        except Error as error:
            raise of_mpi(error) from error
        if why and theirs.Get_rank() == 0:
            # The program's call is behind a method of Intracomm and its _by_mpi().
            warnings.warn(
                "kccl.interop.mpi leaves the calls of a communicator of "
                f"{theirs.Get_size()} ranks to MPI: {why}",
                RuntimeWarning,
                stacklevel=4,
            )


def has_begun(error: BaseException) -> bool:
    """Tells whether MPI had begun the call that raised an error.

    MPI matches the calls that it has begun, and a rank that was refused must call again. MPI
    refuses wrong arguments; mpi4py refuses others, with exceptions of Python. Any other error is
    one of communicating, as that the ranks' lengths differ. MPI may raise it on one rank only, and
    the call is over for all of them.
    """
    return isinstance(error, MPI.Exception) and error.Get_error_class() not in _REFUSED


def _opened(comm: Any) -> tuple[Link | Literal[False], str]:
    """Makes the communicator of KCCL, or none on any rank. Collective.

    Returns:
        What makes the calls; and what to warn of, "" for nothing.
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
        """What each rank says. Collective."""
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
        # KCCL_CHECK=1 compares calls out of band, where MPI does not go on.
        made = join(
            job_rank,
            replace(env, check=0),
            lambda: opener("host", "of_process", job_rank.local_rank),
        )
    except Exception as error:
        # The others must hear of whatever it is.
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
    """The first reason that any rank has, with the rank's number; "": none has."""
    return next((f"{text} (rank {rank})" for rank, text in enumerate(texts) if text), "")


def _cannot_start() -> str:
    """Why KCCL cannot start in this process, as far as it knows alone; "": it can."""
    try:
        job.check_namespaces(_env.namespaces)
        job.claim(os.environ)
    except Exception as error:
        return str(error)
    return ""


def _reason_for_mpi(size: int) -> str:
    """Why this rank cannot use KCCL for a communicator of so many ranks; "": it can."""
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
    """Lets MPI go on in waits of this process, if it does not yet. Collective."""
    # Dup() would copy the program's attributes. All ranks keep it, because all would have to free
    # it.
    _progress.append(MPI.Intracomm.Create(comm, comm.Get_group()))
    if len(_progress) == 1:
        progress.go_on_in_waits(MPI, _progress[0])


def _end_all(*_: Any) -> None:
    """Closes what is open, before MPI is finalized or Python is. Idempotent."""
    if os.getpid() != _pid:
        return
    progress.leave_alone()
    for link in list(_open):
        link.comm.close()


# MPI_Finalize deletes the attributes of MPI.COMM_SELF first. mpi4py calls it at the end of a
# process, when Python has ended already.
MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_end_all), True)
atexit.register(_end_all)
