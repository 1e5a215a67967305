"""Handles standard streams that are closed, whose reader leaves, or whose disk is full."""

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
# Errors of writes to standard output that are not the command's fault.
_OF_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO}


def set_up() -> bool:
    """Opens /dev/null in place of standard streams that are closed, and sets how to encode text.

    Characters that a stream's encoding does not have are written as "?". Bytes of an argument that
    Python could not decode are written unchanged.

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
        # Python's error handler is "strict", or "surrogateescape" in the locale C.
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=_REPLACE)
    return _STDOUT in closed


def _replaced(error: UnicodeError) -> tuple[bytes, int]:
    """Returns the bytes to write for characters that an encoding lacks, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return b"".join(
        bytes([ord(each) - 0xDC00]) if "\udc80" <= each <= "\udcff" else b"?" for each in lacking
    ), error.end


@contextmanager
def silence(wanted: bool) -> Iterator[None]:
    """Discards everything that its body prints, if `wanted`."""
    if not wanted:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def drop_output() -> None:
    """Discards what is still buffered for standard output, so that Python does not fail again to
    write it at its exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def of_output(error: OSError) -> errors.Error | None:
    """Returns a kccl.Error for an error of writing to standard output; None for any other error."""
    if error.filename is not None or error.errno not in _OF_OUTPUT:
        return None
    return errors.Error(f"cannot write to standard output: {error.strerror}")
