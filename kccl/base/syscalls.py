"""Raises an error that names a system call that the system refused, for example by seccomp."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import BackendError

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


@contextmanager
def allowed(call: str) -> Iterator[None]:
    """Returns a context for one or more system calls, whose names are in `call`.

    Raises:
        BackendError: A call is refused. Other errors of the system are raised as they are.
    """
    try:
        yield
    except OSError as error:
        check_allowed(error, call)
        raise


def check_allowed(error: OSError, call: str) -> None:
    """Raises BackendError if `error` says that the system refuses the call."""
    if error.errno in _REFUSED:
        raise BackendError(
            f"the system refuses {call} ({error.strerror}), and ranks need it: allow it in the "
            "container's seccomp profile, or in the security module; `kccl doctor` shows what else "
            "is missing"
        ) from error
