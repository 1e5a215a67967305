"""Memory of a rank that the kernels of one call pass data through."""

from collections.abc import Callable
from typing import Any

_LEAST_BYTES = 4096


class Temporaries:
    """Memory for each channel, because calls on different channels may overlap.

    When a channel needs more, its older memory stays, because a CUDA graph may use it.
    """

    def __init__(self, allocate: Callable[[int], tuple[int, Any]]) -> None:
        """Allocates nothing yet.

        Args:
            allocate: Takes a number of bytes. Returns the address of new memory, and an object that
                keeps it.
        """
        self._allocate = allocate
        self._rooms: dict[int, list[tuple[int, int, Any]]] = {}

    def room(self, nbytes: int, channel: int = 0) -> int:
        """Returns the address of at least `nbytes` bytes, which all calls of a channel share."""
        rooms = self._rooms.setdefault(channel, [])
        known = rooms[-1][1] if rooms else 0
        if not rooms or known < nbytes:
            size = max(nbytes, 2 * known, _LEAST_BYTES)
            address, keep = self._allocate(size)
            rooms.append((address, size, keep))
        return rooms[-1][0]

    def drop(self) -> None:
        """Drops all memory. Later calls do not use it, because they find an error in the status."""
        self._rooms.clear()
