"""Inputs and expected results of the persistent kernels of chains.cuh.

A launch is a chain of calls, each on the output of the call before. This module computes the chain
step by step, in the same precision and order as the device. So results are compared by bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..harness.collective import Array, Problem
from ..harness.data import make_input

# Number of elements in a pattern. Not a power of two, so that slices do not start where the pattern
# does. Small, so that thousands of steps take milliseconds.
_DISTINCT = 1009
# The powers of two by which sums may grow. All types but float16 have this range.
_GROWTH = 100
_SHORTEST_TIMED = 8  # kShortestTimed of chains.cuh
DTYPES = ("float32", "float64", "bfloat16")
SHIFTS = 0x9E3779B97F4A7C15
"""Bit k % 64 is set if call k of all_gather moves the chunks by one rank. They have no pattern."""


@dataclass(frozen=True)
class Chain:
    """Inputs and expected results of one collective's launches.

    Attributes:
        start: (problem, rank) -> the contents of a rank's `x` before the first call.
        end: (problem, rank, calls, period) -> the expected result after the last call.
        factor: (problem, rank, period) -> the factor that the kernel multiplies by once a period.
        part: (problem, rank) -> the elements of a rank's `out` that are the result.
    """

    start: Callable[[Problem, int], Array]
    end: Callable[[Problem, int, int, int], Array]
    factor: Callable[[Problem, int, int], float]
    part: Callable[[Problem, int], slice]


def period(world_size: int) -> int:
    """The number of calls from one multiplication to the next.

    As many as the range of a sum allows. It is coprime with the world size, so that in time each
    rank is the root of a broadcast whose data have just changed.
    """
    most = int(_GROWTH / math.log2(max(world_size, 2)))
    return next(count for count in range(most, 0, -1) if math.gcd(count, world_size) == 1)


def short_period(world_size: int) -> int:
    """The same for launches whose data change often.

    Not in every call: the sign would then be the same as two calls before, when the slot was last
    written. With this period a stale word differs from the new one in at least two of five calls.
    """
    return next(count for count in itertools.count(2) if math.gcd(count, world_size) == 1)


def _pattern(problem: Problem, length: int, rank: int, seed: int) -> Array:
    few = replace(problem, count=min(length, _DISTINCT))
    return np.resize(make_input(few, rank, seed), length)


def _wide(values: Array) -> Array:
    return values.astype(np.float64 if values.dtype == np.float64 else np.float32)


def _sum(values: Sequence[Array]) -> Array:
    """In rank order, rounded once."""
    total = _wide(values[0])
    for value in values[1:]:
        total = total + _wide(value)
    return total.astype(values[0].dtype)


def _times(values: Array, factor: float) -> Array:
    wide = _wide(values)
    product: Array = (wide * wide.dtype.type(factor)).astype(values.dtype)
    return product


def _changes(calls: int, length: int) -> range:
    """The calls before which there is a multiplication."""
    return range(length, calls, length)


# ---- all_reduce: every call multiplies by the number of ranks ----------------------------------


def _all_reduce_start(problem: Problem, rank: int) -> Array:
    return _pattern(problem, problem.count, rank, 0)


def _all_reduce_factor(problem: Problem, rank: int, length: int) -> float:
    # Together the factors undo the growth of a period. They differ, so that ranks send other data.
    weight = (2 * rank + 1) / problem.world_size
    return weight * float(problem.world_size) ** -length


def _all_reduce_end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    del rank
    # nbytes is 0, so that all long messages share one entry of the cache.
    few = replace(problem, count=min(problem.count, _DISTINCT), nbytes=0)
    return np.resize(_sum_of_sums(few, calls, length), problem.count)


@lru_cache(maxsize=32)
def _sum_of_sums(problem: Problem, calls: int, length: int) -> Array:
    ranks = range(problem.world_size)
    factors = [_all_reduce_factor(problem, peer, length) for peer in ranks]
    values = [_all_reduce_start(problem, peer) for peer in ranks]
    changes = _changes(calls, length)
    for call in range(calls):
        if call in changes:
            values = [_times(each, by) for each, by in zip(values, factors, strict=True)]
        values = [_sum(values)] * problem.world_size
    return values[0]


# ---- reduce_scatter: every call adds the peers' chunks to the rank's own -------------------------


def _chunks(problem: Problem, rank: int) -> list[Array]:
    length = problem.count // problem.world_size
    ranks = range(problem.world_size)
    return [_pattern(problem, length, rank, 1 + chunk) for chunk in ranks]


def _reduce_scatter_start(problem: Problem, rank: int) -> Array:
    return np.concatenate(_chunks(problem, rank))


def _reduce_scatter_end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    chunk = problem.count // problem.world_size
    few = replace(problem, count=min(chunk, _DISTINCT) * problem.world_size, nbytes=0)
    return np.resize(_own_chunk(few, rank, calls, length), chunk)


@lru_cache(maxsize=32)
def _own_chunk(problem: Problem, rank: int, calls: int, length: int) -> Array:
    ranks = range(problem.world_size)
    values = [_chunks(problem, peer)[rank] for peer in ranks]
    changes = _changes(calls, length)
    for call in range(calls):
        if call in changes:
            changed = {rank} if length >= _SHORTEST_TIMED else {*ranks} - {rank}
            values = [_times(values[k], -1.0) if k in changed else values[k] for k in ranks]
        values[rank] = _sum(values)
    return values[rank]


# ---- all_gather: in some calls all chunks move by one rank ---------------------------------------


def _all_gather_start(problem: Problem, rank: int) -> Array:
    del rank
    length = problem.count // problem.world_size
    return np.concatenate([_pattern(problem, length, p, 0) for p in range(problem.world_size)])


def _all_gather_end(problem: Problem, rank: int, calls: int, _period: int) -> Array:
    length = problem.count // problem.world_size
    moved = sum(SHIFTS >> call % 64 & 1 for call in range(calls))
    return np.roll(_all_gather_start(problem, rank), -length * moved)


# ---- broadcast: every call sends what the root has received --------------------------------------


def _broadcast_end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    del rank
    changed = -1.0 if len(_changes(calls, length)) % 2 else 1.0
    return _times(_all_reduce_start(problem, 0), changed)


def _minus_one(problem: Problem, rank: int, length: int) -> float:
    del problem, rank, length
    return -1.0


def _all(problem: Problem, rank: int) -> slice:
    del rank
    return slice(0, problem.count)


CHAINS = {
    "all_reduce": Chain(_all_reduce_start, _all_reduce_end, _all_reduce_factor, _all),
    "reduce_scatter": Chain(
        _reduce_scatter_start, _reduce_scatter_end, _minus_one, lambda p, rank: p.chunk(rank)
    ),
    "all_gather": Chain(_all_gather_start, _all_gather_end, _minus_one, _all),
    "broadcast": Chain(_all_reduce_start, _broadcast_end, _minus_one, _all),
}
