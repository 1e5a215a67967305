"""Defines kccl.interop.mpi.Intracomm: a subclass of mpi4py's, whose collectives KCCL makes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from mpi4py import MPI

from ..base.errors import Error
from . import mpi_calls as calls
from .mpi_messages import ByMpi
from .mpi_opening import Link, count, has_begun, link_of
from .mpi_types import MOVES, REDUCES, array_of

_Theirs = MPI.Intracomm
_IN_PLACE, _SUM = MPI.IN_PLACE, MPI.SUM
_LISTS = (list, tuple)


class _Kind(type):
    """Makes mpi4py's own Intracomms, such as a Cartcomm, instances of this module's Intracomm."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, _Theirs)
            if cls is Intracomm
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return (
            issubclass(subclass, _Theirs)
            if cls is Intracomm
            else super().__subclasscheck__(subclass)
        )


class Intracomm(_Theirs, metaclass=_Kind):
    """An intracommunicator of mpi4py whose collectives KCCL makes where it can.

    It inherits everything else from mpi4py. See kccl.interop.mpi.
    """

    __module__ = "kccl.interop.mpi"

    # The result of link_of() once it is final: False means that MPI makes all calls. None: not
    # known to this object yet, so each call asks link_of().
    _link: Link | Literal[False] | None = None
    # "COMM_WORLD" or "COMM_SELF" if this object stands for that predefined communicator of MPI;
    # else "". For such an object free() does nothing, Free() and Disconnect() are made on mpi4py's
    # own object, and pickle stores only the name.
    _constant = ""

    def _done(self, call: Callable[..., None], *arguments: Any, **options: Any) -> bool:
        """Makes a call by KCCL, for messages of any form. Returns True if KCCL has made it, and
        False if MPI must make it.
        """
        link = self._link
        assert isinstance(link, Link)
        try:
            call(link, *arguments, **options)
        except ByMpi as reason:
            link.say(calls.NAMES[call], str(reason))
            return False
        except Error as error:
            # judge() raises if the communicator has failed. Else KCCL has refused an argument, for
            # which mpi4py would raise no error, so KCCL's is raised.
            link.judge(self, error)
            link.fail(self, error)
        return True

    def _by_mpi(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(self, *arguments)
        except MPI.Exception as error:
            if self._link is None and has_begun(error):
                count(self)
            raise
        if self._link is None:
            count(self)

    # ---- Collectives ---------------------------------------------------------------------------

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = _SUM) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link:
            if type(recvbuf) in _LISTS:
                sendbuf, recvbuf = array_of(sendbuf), array_of(recvbuf)
            try:
                name = REDUCES[recvbuf.dtype, id(op)]
                if sendbuf is _IN_PLACE:
                    link.all_reduce(recvbuf, op=name)
                    return
                if sendbuf is not recvbuf:
                    link.all_reduce(sendbuf, out=recvbuf, op=name)
                    return
            except (AttributeError, KeyError, TypeError):
                pass
            except Error as error:
                link.judge(self, error)
            if self._done(calls.all_reduce, sendbuf, recvbuf, op):
                return
        self._by_mpi(_Theirs.Allreduce, sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = _SUM, root: int = 0) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link:
            if type(sendbuf) in _LISTS:
                sendbuf, recvbuf = array_of(sendbuf), array_of(recvbuf)
            try:
                if sendbuf is not _IN_PLACE and sendbuf is not recvbuf:
                    name = REDUCES[sendbuf.dtype, id(op)]
                    out = recvbuf if link.rank == root else None
                    if out is not None or link.rank != root:
                        link.reduce(sendbuf, root, out=out, op=name)
                        return
            except (AttributeError, KeyError, TypeError):
                pass
            except Error as error:
                link.judge(self, error)
            if self._done(calls.reduce, sendbuf, recvbuf, op, root):
                return
        self._by_mpi(_Theirs.Reduce, sendbuf, recvbuf, op, root)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = _SUM) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link:
            if type(recvbuf) in _LISTS and sendbuf is not _IN_PLACE:
                sendbuf, recvbuf = array_of(sendbuf, link.size), array_of(recvbuf)
            try:
                name = REDUCES[recvbuf.dtype, id(op)]
                if sendbuf is not _IN_PLACE:
                    link.reduce_scatter(sendbuf, out=recvbuf, op=name)
                    return
            except (AttributeError, KeyError, TypeError):
                pass
            except Error as error:
                link.judge(self, error)
            if self._done(calls.reduce_scatter_block, sendbuf, recvbuf, op):
                return
        self._by_mpi(_Theirs.Reduce_scatter_block, sendbuf, recvbuf, op)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = _SUM,
    ) -> None:
        """See mpi4py. Without recvcounts the call is MPI's."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.reduce_scatter, sendbuf, recvbuf, recvcounts, op):
            return
        self._by_mpi(_Theirs.Reduce_scatter, sendbuf, recvbuf, recvcounts, op)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Any = _SUM) -> None:
        """See mpi4py."""
        if not self._scans(sendbuf, recvbuf, op, exclusive=False):
            self._by_mpi(_Theirs.Scan, sendbuf, recvbuf, op)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Any = _SUM) -> None:
        """See mpi4py."""
        if not self._scans(sendbuf, recvbuf, op, exclusive=True):
            self._by_mpi(_Theirs.Exscan, sendbuf, recvbuf, op)

    def _scans(self, sendbuf: Any, recvbuf: Any, op: Any, *, exclusive: bool) -> bool:
        link = link_of(self) if self._link is None else self._link
        if not link:
            return False
        if type(recvbuf) in _LISTS:
            sendbuf, recvbuf = array_of(sendbuf), array_of(recvbuf)
        try:
            name = REDUCES[recvbuf.dtype, id(op)]
            if sendbuf is not _IN_PLACE and sendbuf is not recvbuf:
                link.scan(sendbuf, out=recvbuf, op=name, exclusive=exclusive)
                return True
        except (AttributeError, KeyError, TypeError):
            pass
        except Error as error:
            link.judge(self, error)
        return self._done(calls.scan, sendbuf, recvbuf, op, exclusive=exclusive)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link:
            if type(buf) in _LISTS:
                buf = array_of(buf)
            try:
                if buf.dtype in MOVES:
                    link.broadcast(buf, root)
                    return
            except (AttributeError, TypeError):
                pass
            except Error as error:
                link.judge(self, error)
            if self._done(calls.broadcast, buf, root):
                return
        self._by_mpi(_Theirs.Bcast, buf, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """See mpi4py."""
        if not self._moves("all_gather", calls.all_gather, sendbuf, recvbuf, is_vector=False):
            self._by_mpi(_Theirs.Allgather, sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.all_gather, sendbuf, recvbuf, is_vector=True):
            return
        self._by_mpi(_Theirs.Allgatherv, sendbuf, recvbuf)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """See mpi4py."""
        if not self._moves("all_to_all", calls.all_to_all, sendbuf, recvbuf):
            self._by_mpi(_Theirs.Alltoall, sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.all_to_all_parts, sendbuf, recvbuf):
            return
        self._by_mpi(_Theirs.Alltoallv, sendbuf, recvbuf)

    def _moves(
        self, name: str, call: Callable[..., None], sendbuf: Any, recvbuf: Any, **options: Any
    ) -> bool:
        link = link_of(self) if self._link is None else self._link
        if not link:
            return False
        if type(recvbuf) in _LISTS:
            sendbuf = array_of(sendbuf, link.size if name == "all_to_all" else 1)
            recvbuf = array_of(recvbuf, link.size)
        try:
            if recvbuf.dtype in MOVES and sendbuf is not _IN_PLACE and sendbuf is not recvbuf:
                getattr(link, name)(sendbuf, out=recvbuf)
                return True
        except (AttributeError, TypeError):
            pass
        except Error as error:
            link.judge(self, error)
        return self._done(call, sendbuf, recvbuf, **options)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.gather, sendbuf, recvbuf, root):
            return
        self._by_mpi(_Theirs.Gather, sendbuf, recvbuf, root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.gather_parts, sendbuf, recvbuf, root):
            return
        self._by_mpi(_Theirs.Gatherv, sendbuf, recvbuf, root)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.scatter, sendbuf, recvbuf, root):
            return
        self._by_mpi(_Theirs.Scatter, sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link and self._done(calls.scatter_parts, sendbuf, recvbuf, root):
            return
        self._by_mpi(_Theirs.Scatterv, sendbuf, recvbuf, root)

    def Barrier(self) -> None:
        """See mpi4py."""
        link = link_of(self) if self._link is None else self._link
        if link:
            try:
                link.barrier()
                return
            except Error as error:
                link.fail(self, error)
        self._by_mpi(_Theirs.Barrier)

    # ---- Communicators -------------------------------------------------------------------------

    def Create(self, group: MPI.Group) -> "Intracomm":
        """See mpi4py."""
        return Intracomm(_Theirs.Create(self, group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> "Intracomm":
        """See mpi4py."""
        return Intracomm(_Theirs.Create_group(self, group, tag))

    def Split(self, color: int = 0, key: int = 0) -> "Intracomm":
        """See mpi4py."""
        return Intracomm(_Theirs.Split(self, color, key))

    def Split_type(
        self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL
    ) -> "Intracomm":
        """See mpi4py."""
        return Intracomm(_Theirs.Split_type(self, split_type, key, info))

    @classmethod
    def Create_from_group(cls, *arguments: Any, **keywords: Any) -> "Intracomm":
        """See mpi4py."""
        return Intracomm(_Theirs.Create_from_group(*arguments, **keywords))

    @classmethod
    def fromhandle(cls, handle: int) -> MPI.Comm:
        """See mpi4py."""
        return _ours(_Theirs.fromhandle(handle))

    @classmethod
    def f2py(cls, arg: int) -> MPI.Comm:
        """See mpi4py."""
        return _ours(_Theirs.f2py(arg))

    def free(self) -> None:
        """See mpi4py."""
        if not self._constant:
            _Theirs.free(self)
            self._link = None

    def Free(self) -> None:
        """See mpi4py."""
        if self._constant:
            getattr(MPI, self._constant).Free()
        else:
            _Theirs.Free(self)
        self._link = None

    def Disconnect(self) -> None:
        """See mpi4py."""
        if self._constant:
            getattr(MPI, self._constant).Disconnect()
        else:
            _Theirs.Disconnect(self)
        self._link = None

    def __reduce__(self) -> Any:
        return self._constant or _Theirs.__reduce__(self)


def _constant(name: str) -> Intracomm:
    made = Intracomm(getattr(MPI, name))
    made._constant = name
    return made


COMM_WORLD = _constant("COMM_WORLD")
COMM_SELF = _constant("COMM_SELF")


def _ours(comm: MPI.Comm) -> MPI.Comm:
    """Returns this module's object for a communicator of mpi4py: COMM_WORLD, COMM_SELF, or a new
    Intracomm. A communicator of another class than mpi4py's Intracomm is returned as it is.
    """
    for constant in (COMM_WORLD, COMM_SELF):
        if comm == constant:
            return constant
    return Intracomm(comm) if type(comm) is _Theirs else comm


NAMES = {name: value for name, value in vars(MPI).items() if not name.startswith("__")} | {
    "COMM_SELF": COMM_SELF,
    "COMM_WORLD": COMM_WORLD,
    "Intracomm": Intracomm,
}
"""All names of kccl.interop.mpi: those of mpi4py.MPI, three of them replaced."""
