"""Turns KCCL's errors into errors that are also MPI.Exception, which users of mpi4py catch."""

import re
from typing import Any

from mpi4py import MPI

from ..base import errors
from ..base.copying import restored
from ..base.failure import AFTER_RESET, WITH_SHRINK


class Exception(MPI.Exception):
    """An MPI.Exception with KCCL's text. Get_error_class() and similar methods work as in MPI's."""

    error_code: int = MPI.ERR_OTHER

    def __int__(self) -> int:
        return self.error_code

    def __str__(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def Get_error_string(self) -> str:
        """Returns KCCL's text of the error."""
        return str(self)


class Error(errors.Error, Exception):
    """A kccl.Error, raised by a call of MPI."""


class Timeout(errors.Timeout, Exception):
    """A kccl.Timeout, raised by a call of MPI."""


class PeerLost(errors.PeerLost, Exception):
    """A kccl.PeerLost, raised by a call of MPI."""

    error_code = MPI.ERR_PROC_FAILED


class InvalidArgument(errors.InvalidArgument, Exception):
    """A kccl.InvalidArgument: the ranks make calls that differ.

    If they differ in lengths, the error code is ERR_TRUNCATE.
    """

    error_code = MPI.ERR_ARG


_OF_KCCL: dict[type[errors.Error], type[errors.Error]] = {
    errors.Timeout: Timeout,
    errors.PeerLost: PeerLost,
    errors.InvalidArgument: InvalidArgument,
}


# Advice in KCCL's errors to call reset() or shrink() -> advice for Intracomm, which has neither.
_INSTEAD = {
    AFTER_RESET: "no rank can go on with this communicator, but with another one, as what its "
    "Dup() returns",
    WITH_SHRINK: "the survivors may go on with communicators that the lost rank is not in",
}


def of_mpi(error: errors.Error) -> Any:
    """Returns the error as this module's class of its kind, with the same attributes. Advice in the
    text names MPI's calls instead of KCCL's.
    """
    kind = _OF_KCCL.get(type(error), Error)
    text = str(error)
    for ours, theirs in _INSTEAD.items():
        text = text.replace(ours, theirs)
    attributes = dict(vars(error))
    if kind is InvalidArgument and len(set(re.findall(r"(\d+) bytes", text))) > 1:
        attributes["error_code"] = MPI.ERR_TRUNCATE
    made = restored(kind, (text,), attributes)
    return made.with_traceback(error.__traceback__)
