"""KCCL's errors as users of mpi4py catch them: each is an MPI.Exception."""

import re
from typing import Any

from mpi4py import MPI

from ..base import errors
from ..base.copying import restored
from ..base.failure import AFTER_RESET, WITH_SHRINK


class Exception(MPI.Exception):
    """An MPI.Exception with KCCL's words. Get_error_class() and the like answer as MPI's does."""

    error_code: int = MPI.ERR_OTHER

    def __int__(self) -> int:
        return self.error_code

    def __str__(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def Get_error_string(self) -> str:
        """What went wrong."""
        return str(self)


class Error(errors.Error, Exception):
    """A kccl.Error, raised by a call of MPI."""


class Timeout(errors.Timeout, Exception):
    """A kccl.Timeout, raised by a call of MPI."""


class PeerLost(errors.PeerLost, Exception):
    """A kccl.PeerLost, raised by a call of MPI."""

    error_code = MPI.ERR_PROC_FAILED


class InvalidArgument(errors.InvalidArgument, Exception):
    """A kccl.InvalidArgument: the ranks make calls that differ. ERR_TRUNCATE: in their lengths."""

    error_code = MPI.ERR_ARG


_OF_KCCL: dict[type[errors.Error], type[errors.Error]] = {
    errors.Timeout: Timeout,
    errors.PeerLost: PeerLost,
    errors.InvalidArgument: InvalidArgument,
}


# What Intracomm has instead of a communicator's reset() and shrink().
_INSTEAD = {
    AFTER_RESET: "no rank can go on with this communicator, but with another one, as what its "
    "Dup() returns",
    WITH_SHRINK: "the survivors may go on with communicators that the lost rank is not in",
}


def of_mpi(error: errors.Error) -> Any:
    """The error as a call of MPI raises it, with the same attributes. The text names MPI's calls
    where it says what to do.
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
