"""Decides which sequences the KV cache keeps, and which slot a request uses."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from ..model.executor import BEGINNING, Place

MOST_SLOTS = 64
"""The most slots of a KV cache."""


@dataclass
class _Slot:
    """The contents of a slot of the KV cache.

    Attributes:
        ids: The ids whose keys and values the slot holds.
        kind: How the keys and values were computed. A request can reuse only those of its own kind.
        used: The number of the last request that used the slot.
    """

    ids: list[int] = field(default_factory=list)
    kind: Hashable = None
    used: int = 0


class Prefixes:
    """The sequences in one process's KV caches, each in a slot. A new sequence replaces the least
    recently used one.

    A process that stopped reading an answer early knows fewer of the answer's ids than the others.
    So the ranks agree on a Place (a slot, and how much of it to use) before a request uses it
    (ranks.py).
    """

    def __init__(self, num_slots: int) -> None:
        """Begins with empty slots.

        Args:
            num_slots: The number of slots.
        """
        self._slots = [_Slot() for _ in range(num_slots)]
        self._number = 0

    @property
    def newest_slot(self) -> int:
        """Returns the slot that was used last."""
        return max(range(len(self._slots)), key=lambda i: self._slots[i].used)

    @property
    def newest(self) -> list[int]:
        """Returns the ids of the slot that was used last."""
        return self._slots[self.newest_slot].ids

    def find(
        self, ids: Sequence[int], kind: Hashable, busy: Collection[int] = ()
    ) -> tuple[Place, list[int]]:
        """Returns the Place that a request should use, and how many of the request's first ids each
        slot has.

        The place's source is the slot that shares the longest prefix with the request. The request
        also uses this slot, unless it would overwrite more than half of it. Then the prefix is
        copied to the least recently used slot.

        Args:
            ids, kind: The request's ids, and how its keys and values are computed.
            busy: Slots in which other requests run. Their prefixes can be copied.
        """
        # The last id is never taken from the cache: it must run, because its logits give a token.
        shared = [
            min(common_prefix(slot.ids, ids), len(ids) - 1) if slot.kind == kind else 0
            for slot in self._slots
        ]
        source = max(range(len(shared)), key=lambda i: (shared[i], self._slots[i].used))
        unused = [i for i in range(len(shared)) if i not in busy]
        oldest = min(unused, key=lambda i: self._slots[i].used)
        if shared[source] == 0:
            return Place(oldest, oldest, 0), shared
        goes_on = 2 * shared[source] >= len(self._slots[source].ids)
        slot = source if goes_on and source not in busy else oldest
        return Place(slot, source, shared[source]), shared

    def begin(self, place: Place, kind: Hashable) -> None:
        """Records that a request begins in a slot, which counts as empty until keep() is called."""
        self._number += 1
        self._slots[place.slot] = _Slot([], kind, self._number)

    def keep(self, place: Place, ids: Sequence[int]) -> None:
        """Records the ids whose keys and values the running request's slot holds."""
        self._slots[place.slot].ids = list(ids)

    def forget_all(self) -> None:
        """Marks all slots as empty, because requests that this process does not know use them."""
        self._slots = [_Slot() for _ in self._slots]

    def forget(self) -> None:
        """Marks slot 0 as empty, because a request has written keys and values there that no other
        request can reuse.
        """
        self._slots[BEGINNING.slot] = _Slot()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many of their first ids two sequences have in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
