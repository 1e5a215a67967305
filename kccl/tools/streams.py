"""The standard streams of a command: closed ones, readers that leave, disks that are full."""

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper

from ..base import descriptors, errors

_STDOUT = 1
_REPLACE = "kccl.replace"
# What a write to standard output may fail with, by no fault of the command.
_OF_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO}


def set_up() -> bool:
    """Opens /dev/null in place of the standard streams that are closed. What a stream's encoding
    does not have becomes "?"; bytes of an argument that Python could not decode stay these bytes.

    Returns:
        Whether standard output was closed.
    """
    closed = descriptors.keep_standard()
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(_STDOUT, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    codecs.register_error(_REPLACE, _replaced)
    for stream in (sys.stdout, sys.stderr):
        # Python has the second in the locale C.
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=_REPLACE)
    return _STDOUT in closed


def _replaced(error: UnicodeError) -> tuple[bytes, int]:
    """Returns what is written for characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return b"".join(
        bytes([ord(each) - 0xDC00]) if "\udc80" <= each <= "\udcff" else b"?" for each in lacking
    ), error.end


@contextmanager
def silence(wanted: bool) -> Iterator[None]:
    """Throws away what is printed, if that is wanted."""
    if not wanted:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def drop_output() -> None:
    """Throws away what standard output has not written. Python would complain again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def of_output(error: OSError) -> errors.Error | None:
    """Returns the error in words, if it is one of writing to standard output."""
    if error.filename is not None or error.errno not in _OF_OUTPUT:
        return None
    return errors.Error(f"cannot write to standard output: {error.strerror}")
