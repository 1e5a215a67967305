"""From which rank a receive on a GPU took its message, where it takes one from any rank.

The kernel chooses the rank, and writes it to a word of memory that the host reads.
"""

from typing import Any
from weakref import ref

from ..base.abi import ffi
from ..base.errors import Error
from .context import Context

# Receives whose words are in use at once. A word is used again when its message has begun to come.
_WORDS = 256
_WORD_BYTES = 4


class Words:
    """Memory of words that kernels write and the host reads."""

    def __init__(self, context: Context) -> None:
        self.address, self._owner = context.backend.answers(_WORDS * _WORD_BYTES)
        self.values: Any = ffi.cast("volatile uint32_t *", self.address)


class Source:
    """The word of one receive.

    Attributes:
        address: Its address, for KcclCall.output.
    """

    def __init__(self, words: Words, number: int) -> None:
        self.address = words.address + number * _WORD_BYTES
        self._words, self._number = words, number
        self._kept = 0

    def keep(self) -> None:
        """Keeps what the word says, because another receive gets the word."""
        self._kept = self._read()

    def _read(self) -> int:
        return self._kept or int(self._words.values[self._number])

    def rank_and_tag(self) -> tuple[int, int] | None:
        """Returns the rank that sent the message, and its tag; None before the message's first
        bytes have come. The array is complete when the stream is.
        """
        said = self._read()
        return ((said & 0xFF) - 1, said >> 8) if said else None


class Sources:
    """The words of a communicator's receives from any rank.

    They are a ring. Receives in a graph have words of their own, because each replay of the graph
    writes to them.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ring: Words | None = None
        self._next = 0
        self._taken: list[ref[Source] | None] = [None] * _WORDS
        self._in_graphs: Words | None = None
        self._next_in_graphs = 0
        # Memory that is no longer used here. It stays, because a kernel may still write to it.
        self._old: list[Words] = []

    def new(self, *, is_captured: bool) -> Source:
        """Returns a word for a receive that is about to be issued, or captured in a graph.

        Raises:
            Error: Too many receives from any rank are under way.
        """
        return self._new_in_graph() if is_captured else self._new_in_ring()

    def _new_in_graph(self) -> Source:
        number = self._next_in_graphs % _WORDS
        if self._in_graphs is None or number == 0:
            if self._in_graphs is not None:
                self._old.append(self._in_graphs)
            self._in_graphs = Words(self._context)
        self._next_in_graphs += 1
        return Source(self._in_graphs, number)

    def _new_in_ring(self) -> Source:
        if self._ring is None:
            self._ring = Words(self._context)
        number = self._next % _WORDS
        before = self._taken[number]
        if before is not None and self._ring.values[number] == 0:
            raise Error(
                f"{_WORDS} receives from any rank that irecv() has begun are under way: wait for "
                "their streams first"
            )
        source = before() if before is not None else None
        if source is not None:
            source.keep()
        self._ring.values[number] = 0
        made = Source(self._ring, number)
        self._taken[number] = ref(made)
        self._next += 1
        return made

    def give_back(self, source: Source) -> None:
        """Frees the word of a receive that could not be issued. One in a graph stays unused."""
        self._taken = [
            each if each is None or each() is not source else None for each in self._taken
        ]

    def forget(self) -> None:
        """Gives up the ring, after the backend has forgotten the messages."""
        if self._ring is not None:
            self._old.append(self._ring)
        self._ring = None
        self._next = 0
        self._taken = [None] * _WORDS
