"""Keeps the numbers 0 to 2 for the standard streams."""

import os

from .errors import BackendError


def keep_standard() -> list[int]:
    """Opens /dev/null in place of the standard streams that are closed.

    Otherwise the next socket or file would get the number of one of them, and what a program
    prints would go there.

    Returns:
        The numbers of those that were closed.

    Raises:
        BackendError: /dev/null cannot be opened.
    """
    closed = [fd for fd in range(3) if not is_open(fd)]
    for fd in closed:
        # This takes the lowest number that is free.
        try:
            opened = os.open(os.devnull, os.O_RDWR)
        except OSError as error:
            raise BackendError(
                f"standard stream {fd} is closed, and {os.devnull} cannot be opened in its place "
                f"({error.strerror}): start the program with its standard streams open"
            ) from error
        if opened > 2:
            # Another thread has taken the number meanwhile.
            os.close(opened)
        else:
            # Children expect to have these, too.
            os.set_inheritable(opened, True)
    return closed


def is_open(fd: int) -> bool:
    """Tells whether this process has a descriptor of this number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
