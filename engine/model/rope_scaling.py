"""Kinds of RoPE scaling that need more than the frequencies: theta, or the length of the request.
All positions of a request have the frequencies of its length.
"""

import math
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument

from .rope import MOST_POSITIONS, Scaling, TableScaling, check_positive, stretched

Frequencies = NDArray[np.float64]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor for cosines and sines. It is used if a model's file gives none."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class DynamicScaling(Scaling):
    """Dynamic NTK scaling: if a request is longer than the training's context, theta grows with the
    request's length.

    Attributes:
        factor: How fast theta grows.
        original_context: The context of the training, in tokens.
    """

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        for name in ("factor", "original_context"):
            check_positive(f"{name} of the RoPE scaling", getattr(self, name))

    def scale(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        num = len(frequencies)
        if num < 2:
            raise InvalidArgument(
                f"the RoPE scaling 'dynamic' has {num} pair, must have at least 2: a head_dim of 4"
            )
        excess = max(length / self.original_context, 1.0) - 1
        # Here theta becomes theta * growth ** (2 * num / (2 * num - 2)).
        growth = 1 + self.factor * excess
        slowed: Frequencies = frequencies * np.power(growth, -(np.arange(num) / (num - 1)))
        return slowed

    def reach(self, length: int) -> float:
        return max(length, self.original_context)

    def longest(self, context: int) -> int:
        # There are frequencies for every length, so the scaling sets no limit.
        return MOST_POSITIONS


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: frequencies of slow pairs are divided by a factor, and those of fast pairs stay.
    Between them, a linear ramp over the pairs' numbers blends both.

    Attributes:
        factor: Divides the frequencies of slow pairs.
        original_context: The context of the first training, in tokens.
        beta_fast, beta_slow: The ramp begins at the pair that turns beta_fast times within the
            original context, and ends at the one that turns beta_slow times.
        truncate: Whether the ramp's ends are rounded outwards to whole pairs.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "original_context", "beta_fast", "beta_slow"):
            check_positive(f"{name} of the RoPE scaling", getattr(self, name))

    def scale(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        low, high = self.ramp(2 * len(frequencies), theta)
        # If the ramp begins and ends at the same pair, 0.001 avoids a division by 0. The ramp is
        # then a step.
        ramp = (np.arange(len(frequencies)) - low) / (high - low or 0.001)
        divided: Frequencies = np.clip(ramp, 0.0, 1.0)
        return frequencies * (1 - divided + divided / self.factor)

    def ramp(self, head_dim: int, theta: float) -> tuple[float, float]:
        """Returns the pairs, counted from 0, at which the ramp begins and ends."""
        if theta <= 1:
            raise InvalidArgument(
                f"theta of RoPE is {theta}, must be above 1 for the RoPE scaling 'yarn'"
            )

        def pair_that_turns(turns: float) -> float:
            ratio = self.original_context / (turns * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, head_dim - 1)

    def longest(self, context: int) -> int:
        return max(context, stretched(self.original_context, self.factor))


@dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """LongRoPE: each pair's frequency is divided by its own factor, from one of two tables.

    Attributes:
        short_factors: The factors for requests up to the original context.
        long_factors: The factors for longer requests.
        original_context: The context of the first training, in tokens.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int

    def __post_init__(self) -> None:
        check_positive("original_context of the RoPE scaling", self.original_context)
        self._tables()

    def scale(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        # Both tables are applied, so that a table of a wrong size raises when the model is opened.
        short, long = (each.scale(frequencies, theta, length) for each in self._tables())
        return long if length > self.original_context else short

    def reach(self, length: int) -> float:
        return math.inf if length > self.original_context else self.original_context

    def _tables(self) -> tuple[TableScaling, TableScaling]:
        return TableScaling(self.short_factors), TableScaling(self.long_factors)


@dataclass(frozen=True)
class ChainedScaling(Scaling):
    """Several scalings, applied one after the other."""

    parts: tuple[Scaling, ...]

    def scale(self, frequencies: Frequencies, theta: float, length: int) -> Frequencies:
        return reduce(lambda found, part: part.scale(found, theta, length), self.parts, frequencies)

    def reach(self, length: int) -> float:
        return min(part.reach(length) for part in self.parts)

    def longest(self, context: int) -> int:
        return max(part.longest(context) for part in self.parts)
