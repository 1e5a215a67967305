"""Describes the inputs and expected results of a chain: calls in a persistent kernel, each of which
works on the output of the call before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .problem import Array, Problem


def minus_one(problem: Problem, rank: int, length: int) -> float:
    """Returns -1, the factor of chains that only change signs."""
    del problem, rank, length
    return -1.0


def everything(problem: Problem, rank: int) -> slice:
    """Returns the slice of all of `out`, for chains whose result is the whole message."""
    del rank
    return slice(0, problem.count)


@dataclass(frozen=True)
class Chain:
    """Inputs and expected results of one collective's launches.

    `period` is a number of calls: after each period the kernel multiplies its data by `factor`, so
    that sums stay in range and data change (see in_kernel/chains.cuh).

    Attributes:
        start: (problem, rank) -> the contents of a rank's `x` before the first call.
        end: (problem, rank, calls, period) -> the expected result after the last call.
        factor: (problem, rank, period) -> the factor that the kernel multiplies by once a period.
        part: (problem, rank) -> the elements of a rank's `out` that are the result.
    """

    start: Callable[[Problem, int], Array]
    end: Callable[[Problem, int, int, int], Array]
    factor: Callable[[Problem, int, int], float] = minus_one
    part: Callable[[Problem, int], slice] = everything
