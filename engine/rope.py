"""Rotary position embedding: which pairs turn, and how fast."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument


def check_positive(name: str, value: float) -> None:
    """Raises InvalidArgument unless a field is a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise InvalidArgument(f"{name} is {value!r}, must be a number above 0")


class Scaling(Protocol):
    """How a model stretches its frequencies for contexts longer than it was first trained on."""

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """The frequencies to use instead."""


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by one factor."""

    factor: float

    def __post_init__(self) -> None:
        check_positive("the factor of the RoPE scaling", self.factor)

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: slow pairs are divided by a factor, fast ones stay, those between are blended.

    Attributes:
        factor: Divides the frequencies of slow pairs.
        low_freq_factor, high_freq_factor: A pair is slow if it turns fewer than low_freq_factor
            times within the original context, and fast if more than high_freq_factor times.
        original_context: The context of the first training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_context"):
            check_positive(f"{name} of the RoPE scaling", getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise InvalidArgument(
                f"high_freq_factor of the RoPE scaling is {self.high_freq_factor}, "
                f"must be above low_freq_factor, {self.low_freq_factor}"
            )

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        turns = self.original_context * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        share_kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return frequencies * (share_kept + (1 - share_kept) / self.factor)


@dataclass(frozen=True)
class TableScaling:
    """Each pair's frequency divided by its own factor, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            check_positive("a factor of the RoPE scaling", factor)

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(self.factors) != len(frequencies):
            raise InvalidArgument(
                f"the RoPE scaling has {len(self.factors)} factors, must have one for each of "
                f"{len(frequencies)} pairs"
            )
        factors: NDArray[np.float64] = np.array(self.factors, np.float64)
        return frequencies / factors


@dataclass(frozen=True)
class Rope:
    """The rotary position embedding of a model.

    Attributes:
        theta: Pair i of a head turns by theta ** (-2i / head_dim) radians a position, unscaled.
        is_interleaved: A pair is the elements (2i, 2i+1) of a head; otherwise (i, i + head_dim/2).
        scaling: Changes the frequencies; None leaves them.
    """

    theta: float = 10_000.0
    is_interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_positive("theta of RoPE", self.theta)

    def frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians a position of each pair, scaled: float64 [head_dim / 2]."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        unscaled: NDArray[np.float64] = np.power(float(self.theta), -exponents)
        return unscaled if self.scaling is None else self.scaling.scale(unscaled)
