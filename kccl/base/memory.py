"""Checks whether there is enough memory for what the ranks ask for.

The system gives memory at the first write. If there is too little, it kills the process. So windows
that exist and have not been written yet count as taken.
"""

import sys
from dataclasses import replace

from .. import topology
from . import mapping
from .errors import BackendError


def memory_room(needed: int = sys.maxsize) -> list[topology.Room]:
    """Returns the memory limits that hold for this process. In each, `promised` is the bytes of
    mapped windows that nobody has written yet.

    Args:
        needed: The bytes that all ranks together ask for. If they fit even if no page of the
            windows has been written, the pages are not counted, and `promised` is 0. Counting
            takes 0.1 ms per GiB.
    """
    rooms = topology.memory_room()
    # Only limits on several processes together count windows when they are written. A limit on one
    # process counts its address space, which has the windows already, or its private memory.
    shared = [room.nbytes for room in rooms if not room.is_of_process]
    if needed <= min(shared, default=needed) - mapping.mapped_bytes():
        return rooms
    promised = mapping.untouched_bytes()
    return [room if room.is_of_process else replace(room, promised=promised) for room in rooms]


def check_room(nbytes: int, count: int) -> None:
    """Checks that memory of `nbytes` bytes on each of `count` ranks of this machine can be used.

    Raises:
        BackendError: There is too little memory.
    """
    for room in memory_room(nbytes * count):
        # All ranks map all parts, so a limit of one process counts them all, too.
        if nbytes * count > room.free and not room.is_private:
            each = f" on each of {count} ranks" if count > 1 else ""
            earlier = f", less {room.promised} bytes of earlier windows that nobody has written yet"
            raise BackendError(
                f"{nbytes} bytes{each} are more than the {room.nbytes} bytes of memory that "
                f"{room.limit} has left{earlier if room.promised else ''}: {room.cure}"
                + (", or close() earlier windows" if room.promised else "")
            )
