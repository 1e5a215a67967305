"""Whether memory that the ranks ask for can be had."""

from .. import topology
from .errors import BackendError


def check_room(nbytes: int, count: int) -> None:
    """Checks that memory of `nbytes` bytes on each of `count` ranks of this machine can be used.

    Memory is taken when it is written first. Where there is too little, the write would be the end
    of the process.

    Raises:
        BackendError: There is too little memory.
    """
    for room in topology.memory_room():
        # All ranks map all parts, so a limit of one process counts them all, too.
        if not room.is_private and nbytes * count > room.nbytes:
            each = f" on each of {count} ranks" if count > 1 else ""
            raise BackendError(
                f"{nbytes} bytes{each} are more than the {room.nbytes} bytes of memory that "
                f"{room.limit} has left: {room.cure}"
            )
