"""Keeps the descriptors 0 to 2 for the standard streams."""

import os

from .errors import BackendError


def keep_standard() -> list[int]:
    """Opens /dev/null in place of the standard streams that are closed.

    Otherwise the next socket or file would get the number of a standard stream, and the program
    would print into it.

    Returns:
        The numbers of the standard streams that were closed.

    Raises:
        BackendError: /dev/null cannot be opened.
    """
    closed = [fd for fd in range(3) if not is_open(fd)]
    for fd in closed:
        # open() takes the lowest free number, which is `fd`.
        try:
            opened = os.open(os.devnull, os.O_RDWR)
        except OSError as error:
            raise BackendError(
                f"standard stream {fd} is closed, and {os.devnull} cannot be opened in its place "
                f"({error.strerror}): start the program with its standard streams open"
            ) from error
        if opened > 2:
            # Another thread has taken the number since the check, so this descriptor is not needed.
            os.close(opened)
        else:
            # Child processes expect to inherit the standard streams.
            os.set_inheritable(opened, True)
    return closed


def is_open(fd: int) -> bool:
    """Tells whether this process has a descriptor of this number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
