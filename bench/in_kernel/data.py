"""What the collectives' chains in persistent kernels (chains.cuh) begin with and end with.

A launch is a chain of calls, each on the output of the call before. Each collective's table has a
Chain, which computes the chain step by step, in the same precision and order as the device. So
results are compared by bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..harness.data import make_input
from ..harness.forms import TYPES
from ..harness.problem import Array, Problem

# Number of elements in a pattern. Not a power of two, so that slices do not start where the pattern
# does. Small, so that thousands of steps take milliseconds.
DISTINCT = 1009
# The powers of two by which sums may grow. All types but float16 have this range.
_GROWTH = 100
SHORTEST_TIMED = 8  # kShortestTimed of chains.cuh
DTYPES = tuple(TYPES)
SHIFTS = 0x9E3779B97F4A7C15
"""Bit k % 64 is set if call k of all_gather moves the chunks by one rank. They have no pattern."""


def period(world_size: int) -> int:
    """Returns the number of calls from one multiplication to the next.

    As many as the range of a sum allows. It is coprime with the world size, so that in time each
    rank is the root of a broadcast whose data have just changed.
    """
    most = int(_GROWTH / math.log2(max(world_size, 2)))
    return next(count for count in range(most, 0, -1) if math.gcd(count, world_size) == 1)


def short_period(world_size: int) -> int:
    """Returns the period of launches whose data change often.

    Not in every call: the sign would then be the same as two calls before, when the slot was last
    written. With this period a stale word differs from the new one in at least two of five calls.
    """
    return next(count for count in itertools.count(2) if math.gcd(count, world_size) == 1)


def pattern(problem: Problem, length: int, rank: int, seed: int) -> Array:
    """Returns `length` elements that repeat DISTINCT ones."""
    few = replace(problem, count=min(length, DISTINCT))
    return np.resize(make_input(few, rank, seed), length)


def _wide(values: Array) -> Array:
    return values.astype(np.float64 if values.dtype == np.float64 else np.float32)


def total(values: Sequence[Array]) -> Array:
    """Returns the sum in rank order, rounded once."""
    wide = _wide(values[0])
    for value in values[1:]:
        wide = wide + _wide(value)
    return wide.astype(values[0].dtype)


def times(values: Array, factor: float) -> Array:
    """Does what multiply() of chains.cuh does."""
    wide = _wide(values)
    product: Array = (wide * wide.dtype.type(factor)).astype(values.dtype)
    return product


def changes(calls: int, length: int) -> range:
    """Returns the calls before which there is a multiplication."""
    return range(length, calls, length)
