"""A 5-gram model of tokens, to compare with: interpolated, modified Kneser-Ney smoothing.

Three discounts an order, estimated from the counts of counts (Chen and Goodman, 1999). The lower
orders count the different tokens before an n-gram, and the lowest is interpolated with equal
probabilities. Nothing is pruned.
"""

import numpy as np

ORDER = 5
# Bits of a token in a key: five tokens fit into 64.
BITS = 12


def keys(tokens: np.ndarray, order: int) -> np.ndarray:
    """A number for each n-gram of a row of tokens; the last token is in the lowest bits."""
    packed = np.zeros(len(tokens) - order + 1, np.uint64)
    for i in range(order):
        part = tokens[i : len(tokens) - order + 1 + i].astype(np.uint64)
        packed = (packed << np.uint64(BITS)) | part
    return packed


class Table:
    """The n-grams of one order, and of each context what smoothing needs."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray) -> None:
        """`grams` are sorted."""
        self.grams, self.counts = grams, counts
        ones, twos, threes, fours = (max(int((counts == n).sum()), 1) for n in (1, 2, 3, 4))
        share = ones / (ones + 2 * twos)
        discounts = [1 - 2 * share * twos / ones, 2 - 3 * share * threes / twos]
        discounts.append(3 - 4 * share * fours / threes)
        # By the count, up to 3. In small corpora the estimates may leave their range.
        self.discounts = np.array([0.0, *np.clip(discounts, 0.1, (0.9, 1.9, 2.9))])
        contexts = grams >> np.uint64(BITS)
        starts = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
        self.contexts = contexts[starts]
        self.totals = np.add.reduceat(counts, starts)
        taken = self.discounts[np.minimum(counts, 3)]
        self.left = np.add.reduceat(taken, starts) / self.totals

    def probabilities(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """The probabilities of the last tokens of n-grams, given those of the order below."""
        where, is_known = find(self.contexts, grams >> np.uint64(BITS))
        at, is_seen = find(self.grams, grams)
        counts = np.where(is_seen, self.counts[at], 0)
        kept = counts - self.discounts[np.minimum(counts, 3)]
        mixed = kept / self.totals[where] + self.left[where] * lower
        return np.where(is_known, mixed, lower)


def find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in a sorted table the wanted are, and whether they are there."""
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return at, table[at] == wanted


class NgramModel:
    """The model of a row of tokens: uint16, below `vocab_size`."""

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        if vocab_size > 1 << BITS:
            raise ValueError(f"vocab_size is {vocab_size}, must be at most {1 << BITS}")
        self.vocab_size = vocab_size
        grams, counts = np.unique(keys(tokens, ORDER), return_counts=True)
        self.tables = [Table(grams, counts)]
        for order in range(ORDER - 1, 0, -1):
            shorter = grams & np.uint64((1 << BITS * order) - 1)
            grams, counts = np.unique(shorter, return_counts=True)
            self.tables.insert(0, Table(grams, counts))

    def bits(self, tokens: np.ndarray) -> float:
        """Bits of all tokens after the first four."""
        probability = np.full(len(tokens) - ORDER + 1, 1 / self.vocab_size)
        packed = keys(tokens, ORDER)
        for order, table in enumerate(self.tables, start=1):
            grams = packed & np.uint64((1 << BITS * order) - 1)
            probability = table.probabilities(grams, probability)
        return float(-np.log2(probability).sum())
