"""What the persistent kernels of in_kernel.cuh begin with, and what must be there at their end.

A launch is a chain of calls, each on the output of the one before. The end is computed here step by
step, in the same precision and order as on the device, and compared by bits.
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

# No power of two, so that no slice begins where the pattern does; few, so that thousands of steps
# take milliseconds.
_DISTINCT = 1009
# Sums may grow by so many powers of two: all but float16 have room for them.
_GROWTH = 100
_SHORTEST_TIMED = 8  # kShortestTimed of in_kernel.cuh
DTYPES = ("float32", "float64", "bfloat16")
SHIFTS = 0x9E3779B97F4A7C15
"""Bit k % 64: whether call k of all_gather moves the chunks on; without a pattern."""


@dataclass(frozen=True)
class Chain:
    """The data of one kind of launch.

    Attributes:
        start: (problem, rank) -> what a rank's `x` holds before the first call.
        end: (problem, rank, calls, period) -> what it holds behind the last.
        factor: (problem, rank, period) -> what the kernel multiplies by once a period.
        part: (problem, rank) -> where in a rank's `out` the result is.
    """

    start: Callable[[Problem, int], Array]
    end: Callable[[Problem, int, int, int], Array]
    factor: Callable[[Problem, int, int], float]
    part: Callable[[Problem, int], slice]


def period(world_size: int) -> int:
    """Calls from one multiplication to the next.

    As many as a sum has room for; no multiple of the ranks' number, so that each is root when a
    broadcast's data are changed.
    """
    most = int(_GROWTH / math.log2(max(world_size, 2)))
    return next(count for count in range(most, 0, -1) if math.gcd(count, world_size) == 1)


def short_period(world_size: int) -> int:
    """The same for data that are to change often.

    Not with every call: what changes its sign then is as it was two calls before, when a slot was
    last written. So the old word differs in two to five calls of five.
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
    """The calls that a multiplication comes before."""
    return range(length, calls, length)


# ---- all_reduce: every call multiplies by the number of ranks ----------------------------------


def _all_reduce_start(problem: Problem, rank: int) -> Array:
    return _pattern(problem, problem.count, rank, 0)


def _all_reduce_factor(problem: Problem, rank: int, length: int) -> float:
    # In all they undo a period's growth, and what one rank adds is not what another does.
    weight = (2 * rank + 1) / problem.world_size
    return weight * float(problem.world_size) ** -length


def _all_reduce_end(problem: Problem, rank: int, calls: int, length: int) -> Array:
    del rank
    # Without its size, so that longer messages need no computation of their own.
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


# ---- all_gather: many a call moves all chunks on by a rank ---------------------------------------


def _all_gather_start(problem: Problem, rank: int) -> Array:
    del rank
    length = problem.count // problem.world_size
    return np.concatenate([_pattern(problem, length, p, 0) for p in range(problem.world_size)])


def _all_gather_end(problem: Problem, rank: int, calls: int, _period: int) -> Array:
    length = problem.count // problem.world_size
    moved = sum(SHIFTS >> call % 64 & 1 for call in range(calls))
    return np.roll(_all_gather_start(problem, rank), -length * moved)


# ---- broadcast: every call hands on what the root has --------------------------------------------


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
