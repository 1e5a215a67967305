"""Shared code for the inputs and expected results of chains in persistent kernels (chains.cuh).

A launch is a chain of calls, each on the output of the call before. Each collective's table has a
Chain, which computes the chain step by step, in the same precision and order as the device. So
results can be compared by bits.
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

# The number of elements in a pattern. It is no power of two, so that slices do not begin where the
# pattern begins. It is small, so that NumPy computes thousands of steps in milliseconds.
DISTINCT = 1009
# Within a period sums may grow by a factor of 2 to this power. The types in DTYPES have this range;
# float16 does not.
_GROWTH = 100
SHORTEST_TIMED = 8  # kShortestTimed of chains.cuh
DTYPES = tuple(TYPES)
SHIFTS = 0x9E3779B97F4A7C15
"""Bit k % 64 is set if call k of all_gather shifts the chunks by one rank. Bits are irregular."""


def period(world_size: int) -> int:
    """Returns the number of calls from one multiplication to the next.

    It is the largest that the range of a sum allows and that is coprime with the world size. So
    each rank in turn is the root of a broadcast whose data have just changed.
    """
    most = int(_GROWTH / math.log2(max(world_size, 2)))
    return next(count for count in range(most, 0, -1) if math.gcd(count, world_size) == 1)


def short_period(world_size: int) -> int:
    """Returns the period of launches whose data change often.

    It is not 1: the sign of all data would then be the same as two calls before, when the same slot
    of the channel was last written. With this period a stale word differs from the new one in at
    least two of five calls.
    """
    return next(count for count in itertools.count(2) if math.gcd(count, world_size) == 1)


def pattern(problem: Problem, length: int, rank: int, seed: int) -> Array:
    """Returns `length` elements, which repeat a pattern of DISTINCT elements."""
    few = replace(problem, count=min(length, DISTINCT))
    return np.resize(make_input(few, rank, seed), length)


def _wide(values: Array) -> Array:
    return values.astype(np.float64 if values.dtype == np.float64 else np.float32)


def total(values: Sequence[Array]) -> Array:
    """Returns the sum of the ranks' values, added in rank order and rounded once."""
    wide = _wide(values[0])
    for value in values[1:]:
        wide = wide + _wide(value)
    return wide.astype(values[0].dtype)


def times(values: Array, factor: float) -> Array:
    """Returns `values` times `factor`, computed and rounded as by multiply() of chains.cuh."""
    wide = _wide(values)
    product: Array = (wide * wide.dtype.type(factor)).astype(values.dtype)
    return product


def changes(calls: int, length: int) -> range:
    """Returns the numbers of the calls before which data are multiplied by the factor."""
    return range(length, calls, length)
