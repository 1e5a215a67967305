"""From which rank a receive on a GPU took its message, where it takes one from any rank.

The kernel chooses the rank, and writes it to a word of memory that the host reads.
"""

from typing import Any
from weakref import ref

from ..base.abi import ffi
from ..base.errors import Error
from .context import Context

# Receives whose words are in use at once. A word is used again when its message has come.
_WORDS = 256
_WORD_BYTES = 4


class Source:
    """The word of one receive.

    Attributes:
        address: Its address, for KcclCall.output.
    """

    def __init__(self, words: Any, owner: Any, number: int, address: int) -> None:
        self.address = address
        self._words, self._number = words, number
        self._owner = owner  # of the memory
        self._kept = 0

    def keep(self) -> bool:
        """Reads the word, which may be used again afterwards. Returns whether the message has
        come.
        """
        self._kept = self._kept or int(self._words[self._number])
        return self._kept != 0

    def rank_and_tag(self) -> tuple[int, int] | None:
        """Returns the rank that sent the message, and its tag; None before it has come."""
        return ((self._kept & 0xFF) - 1, self._kept >> 8) if self.keep() else None


class Sources:
    """The words of a communicator's receives from any rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._words: Any = None
        self._owner: Any = None
        self._address = 0
        self._next = 0
        self._taken: list[ref[Source] | None] = [None] * _WORDS

    def new(self) -> Source:
        """Returns a word for a receive that is about to be issued.

        Raises:
            Error: Too many receives from any rank are under way.
        """
        if self._words is None:
            self._address, self._owner = self._context.backend.answers(_WORDS * _WORD_BYTES)
            self._words = ffi.cast("volatile uint32_t *", self._address)
        number = self._next % _WORDS
        before = self._taken[number]
        if before is not None and self._words[number] == 0:
            raise Error(
                f"{_WORDS} receives from any rank that irecv() has begun are under way: wait for "
                "their streams first"
            )
        source = before() if before is not None else None
        if source is not None:
            source.keep()
        self._words[number] = 0
        made = Source(self._words, self._owner, number, self._address + number * _WORD_BYTES)
        self._taken[number] = ref(made)
        self._next += 1
        return made

    def forget(self) -> None:
        """Gives up all words, after the backend has forgotten the messages."""
        self._words = None
        self._next = 0
        self._taken = [None] * _WORDS
