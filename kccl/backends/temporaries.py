"""Memory of a rank that the kernels of one call pass data through."""

from collections.abc import Callable
from typing import Any

_LEAST_BYTES = 4096


class Temporaries:
    """The memory, for each channel its own, because calls on different channels may overlap.

    What a channel had before it needed more stays: a CUDA graph may use it.
    """

    def __init__(self, allocate: Callable[[int], tuple[int, Any]]) -> None:
        """Allocates nothing yet.

        Args:
            allocate: Takes a number of bytes. Returns the address of so many, and what keeps them.
        """
        self._allocate = allocate
        self._rooms: dict[int, list[tuple[int, int, Any]]] = {}

    def room(self, nbytes: int, channel: int = 0) -> int:
        """Returns the address of at least so many bytes, the same for all calls of a channel."""
        rooms = self._rooms.setdefault(channel, [])
        known = rooms[-1][1] if rooms else 0
        if not rooms or known < nbytes:
            size = max(nbytes, 2 * known, _LEAST_BYTES)
            address, keep = self._allocate(size)
            rooms.append((address, size, keep))
        return rooms[-1][0]

    def drop(self) -> None:
        """Lets all of it go. Calls look at the status first, and find that it is an error."""
        self._rooms.clear()
