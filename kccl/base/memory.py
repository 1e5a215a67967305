"""Whether memory that the ranks ask for can be had."""

from .. import topology
from . import mapping
from .errors import BackendError


def check_room(nbytes: int, count: int) -> None:
    """Checks that memory of `nbytes` bytes on each of `count` ranks of this machine can be used.

    Memory is taken when it is written first. Where there is too little, the write would be the end
    of the process. So what the ranks have mapped earlier and not written yet counts as taken.

    Raises:
        BackendError: There is too little memory.
    """
    for room in topology.memory_room():
        # All ranks map all parts, so a limit of one process counts them all, too.
        if room.is_private:
            continue
        left, promised = room.nbytes, 0
        # The address space of a process has what is mapped, written or not. The others are asked
        # only if it matters, because to look takes 0.1 ms a GiB.
        if not room.is_of_process and nbytes * count > left - mapping.mapped_bytes():
            promised = mapping.untouched_bytes()
        if nbytes * count > left - promised:
            each = f" on each of {count} ranks" if count > 1 else ""
            earlier = f", less {promised} bytes of earlier windows that nobody has written yet"
            raise BackendError(
                f"{nbytes} bytes{each} are more than the {left} bytes of memory that {room.limit} "
                f"has left{earlier if promised else ''}: {room.cure}"
                + (", or close() earlier windows" if promised else "")
            )
