"""Tables of n-grams: the id that most often followed on the last few ids in some texts.

A table proposes drafts (drafts.py) where a text has nothing to copy from. host/ngrams.h says how an
id is found in it. A wrong id costs time, and changes no token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import lib

MOST_IDS: int = lib.kKcclEngineNgramIds
"""The most ids that a table looks at."""
MOST_SLOT_BITS: int = lib.kKcclEngineSlotBits
"""A table has at most 2 to this power words: 8 MiB."""
MOST_ID_BITS: int = lib.kKcclEngineIdBits
"""The most bits of an id plus 1. The other bits of a word tell runs of ids apart."""
# A run counts only if an id has followed on it so often, and it makes so many more places right.
_LEAST = 2
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Ngrams:
    """A table.

    Attributes:
        words: uint32, a power of 2 of them, at least 2.
        vocab_size: The number of the model's ids.
    """

    words: NDArray[np.uint32]
    vocab_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.slot_bits <= MOST_SLOT_BITS or len(self.words) != 1 << self.slot_bits:
            raise kccl.InvalidArgument(
                f"words are {len(self.words)}, must be a power of 2 from 2 to {1 << MOST_SLOT_BITS}"
            )
        check_vocab_size(self.vocab_size)

    @property
    def id_bits(self) -> int:
        """Returns how many of a word's bits are an id plus 1."""
        return self.vocab_size.bit_length()

    @property
    def slot_bits(self) -> int:
        """Returns how many bits of a hash say which word it is."""
        return len(self.words).bit_length() - 1

    @property
    def digest(self) -> str:
        """Returns a text that is equal for equal tables."""
        return hashlib.sha256(self.words.tobytes()).hexdigest()

    def at(self, address: int, most: int) -> dict[str, int]:
        """Returns a KcclEngineNgrams of a table whose words are at an address. A pass has at most
        `most` drafts from it.
        """
        bits = {"slot_bits": self.slot_bits, "id_bits": self.id_bits}
        return {"words": address, "most": most, **bits}

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Returns the id plus 1 of each hash, and 0 where the table has none."""
        words = self.words[hashes >> np.uint64(64 - self.slot_bits)]
        mask = np.uint32((1 << self.id_bits) - 1)
        is_there = ((words ^ hashes.astype(np.uint32)) & ~mask) == 0
        return np.where(is_there, words & mask, np.uint32(0))


def check_vocab_size(vocab_size: int) -> None:
    """Raises InvalidArgument if a table's words have no room for a model's ids."""
    if not 1 <= vocab_size < 1 << MOST_ID_BITS:
        raise kccl.InvalidArgument(
            f"vocab_size is {vocab_size}, must be from 1 to {(1 << MOST_ID_BITS) - 1} for n-grams"
        )


def mixed(hashes: NDArray[np.uint64], ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the hashes of runs that have an id more in front."""
    found = (hashes ^ (ids + np.uint64(1))) * _FACTOR
    found ^= found >> np.uint64(32)
    return found


def build(texts: Sequence[NDArray[np.int32]], vocab_size: int, slot_bits: int) -> Ngrams:
    """Returns a table of the n-grams of some texts. Needs some 40 bytes of memory for each id.

    Short runs come first. A run of an id more is worth as many places as its id gets right beyond
    those that the shorter runs get right. Where several runs share a word, the most valuable has
    it.

    Args:
        texts: The ids of each text.
        vocab_size: The number of the model's ids.
        slot_bits: The table gets 2**slot_bits words.

    Raises:
        InvalidArgument: The vocabulary is too large, or slot_bits is out of range.
    """
    table = Ngrams(np.zeros(1 << slot_bits, np.uint32), vocab_size)
    worth = np.zeros(1 << slot_bits, np.int64)
    texts = [each for each in texts if len(each) > 1]
    if not texts:
        return table
    lengths = [len(each) for each in texts]
    ids = np.concatenate(texts).astype(np.uint64)
    # How many ids of its text stand in front of each id.
    before = np.arange(len(ids)) - np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    # A place is where an id follows on others of its text: `following` on those up to ids[ends].
    ends = np.flatnonzero(before[1:] > 0)
    following, before = ids[ends + 1], before[ends]
    hashes = np.zeros(len(ends), np.uint64)
    is_right, one = np.zeros(len(ends), bool), np.uint64(1)
    for length in range(1, MOST_IDS + 1):
        is_long = before >= length - 1
        ends, following, before = ends[is_long], following[is_long], before[is_long]
        hashes = mixed(hashes[is_long], ids[ends - (length - 1)])
        is_right = is_right[is_long]
        _add(table, worth, hashes, following, is_right)
        found = table.find(hashes)
        is_right = np.where(found != 0, found == following + one, is_right)
    return table


def _add(
    table: Ngrams,
    worth: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    following: NDArray[np.uint64],
    is_right: NDArray[np.bool_],
) -> None:
    """Adds the runs of one length that are worth more than what their words have.

    Args:
        table: The table.
        worth: What its words are worth.
        hashes: The hash of the run at each place.
        following: The id that follows on each.
        is_right: Whether shorter runs propose that id.
    """
    # A word shows no lowest bits of a hash, because its id is there. So the sum of both has a run's
    # places together if it is sorted, and of these the places of each id.
    bits = np.uint64(table.id_bits)
    shown = (hashes >> bits) << bits
    pairs, counts = np.unique(shown | following, return_counts=True)
    runs, first = np.unique((pairs >> bits) << bits, return_index=True)
    # The id that followed most often is taken. If several did, the highest of them is.
    id_mask = (np.uint64(1) << bits) - np.uint64(1)
    best = np.maximum.reduceat((counts.astype(np.uint64) << bits) | (pairs & id_mask), first)
    already = np.sort(shown[is_right])
    num_right = np.searchsorted(already, runs, "right") - np.searchsorted(already, runs)
    num_best = (best >> bits).astype(np.int64)
    gains = num_best - num_right
    words = runs >> np.uint64(64 - table.slot_bits)
    # The last of several runs that share a word is kept, so the order is that of their gains.
    order = np.argsort(gains, kind="stable")
    order = order[(gains[order] >= _LEAST) & (gains[order] > worth[words[order]])]
    words = words[order]
    worth[words] = gains[order]
    table.words[words] = (runs[order] | ((best[order] & id_mask) + np.uint64(1))).astype(np.uint32)
