"""Sees whether a process runs: by a pidfd, or by /proc where the system forbids pidfds.

Kernels before 5.3, and containers with an older seccomp profile, refuse pidfd_open.
"""

import errno
import os
import select
from pathlib import Path

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def pidfd_of(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process ends; None where the system
    refuses pidfd_open.

    Raises:
        ProcessLookupError: There is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        raise


def is_running(pid: int) -> bool:
    """Tells whether the process still runs. A zombie has ended."""
    try:
        pidfd = pidfd_of(pid)
    except ProcessLookupError:
        return False
    if pidfd is None:
        return _state(pid) not in ("", "Z", "X")
    try:
        return not select.select([pidfd], [], [], 0)[0]
    finally:
        os.close(pidfd)


def _state(pid: int) -> str:
    """Returns the state of a process, a letter of proc(5); "" if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name of the program, in parentheses, may have any characters.
    return text.rpartition(")")[2].split()[0]
