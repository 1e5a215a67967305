"""Turns KCCL's errors into errors that are also torch.distributed.DistBackendError.

So PyTorch's users catch them as those of any other backend.
"""

import torch.distributed as dist

from ..base import errors
from ..base.copying import restored


class Error(errors.Error, dist.DistBackendError):
    """A kccl.Error, raised by a process group."""


class Timeout(errors.Timeout, dist.DistBackendError):
    """A kccl.Timeout, raised by a process group."""


class PeerLost(errors.PeerLost, dist.DistBackendError):
    """A kccl.PeerLost, raised by a process group."""


class BackendError(errors.BackendError, dist.DistBackendError):
    """A kccl.BackendError, raised by a process group."""


class InvalidArgument(errors.InvalidArgument, RuntimeError):
    """A kccl.InvalidArgument, so a ValueError; also a RuntimeError. PyTorch's backends use both."""


_OF_KCCL: dict[type[errors.Error], type[errors.Error]] = {
    each.__bases__[0]: each for each in (Error, Timeout, PeerLost, BackendError, InvalidArgument)
}


def of_torch(error: errors.Error) -> errors.Error:
    """Returns the error as this module's class of the same name, with its attributes and its text,
    which a time-out precedes with PyTorch's words for one.

    An error of any other class is returned as it is.
    """
    kind = _OF_KCCL.get(type(error))
    if kind is None:
        return error
    args = error.args
    if kind is Timeout:
        # Programs look for these words in the errors of gloo and NCCL.
        args = (f"kccl: Timed out waiting for a peer: {error}", *args[1:])
    made: errors.Error = restored(kind, args, vars(error))
    return made.with_traceback(error.__traceback__)
