"""Keeps the numbers 0 to 2 for the standard streams."""

import os


def keep_standard() -> list[int]:
    """Opens /dev/null in place of the standard streams that are closed.

    Otherwise the next socket or file would get the number of one of them, and what a program
    prints would go there.

    Returns:
        The numbers of those that were closed.
    """
    closed = [fd for fd in range(3) if not is_open(fd)]
    for _ in closed:
        # os.open() takes the lowest number that is free. Children expect to have these, too.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    return closed


def is_open(fd: int) -> bool:
    """Tells whether this process has a descriptor of this number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
