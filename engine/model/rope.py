"""Rotary position embedding (RoPE): which pairs of a head's elements rotate, and how fast.

Here are the kinds of scaling that compute new frequencies from the old ones alone. rope_scaling.py
has those that also need theta or the request's length.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument

MOST_POSITIONS = 2**31 - 1


def check_positive(name: str, value: float) -> None:
    """Raises InvalidArgument unless a field is a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise InvalidArgument(f"{name} is {value!r}, must be a number above 0")


def stretched(context: int, factor: float) -> int:
    """Returns a context multiplied by a scaling's factor: at least `context`, and at most
    MOST_POSITIONS.
    """
    return int(min(max(context * factor, context), MOST_POSITIONS))


class Scaling(ABC):
    """How a model stretches its frequencies for contexts longer than it was first trained on."""

    @abstractmethod
    def scale(
        self, frequencies: NDArray[np.float64], theta: float, length: int
    ) -> NDArray[np.float64]:
        """Returns the frequencies, scaled for a request of `length` positions.

        Raises:
            InvalidArgument: The scaling does not fit the number of pairs, or theta.
        """

    def reach(self, length: int) -> float:
        """Returns the length of the longest request that has the same frequencies as a request of
        `length` positions.
        """
        return math.inf

    def longest(self, context: int) -> int:
        """Returns the most positions that a model trained for `context` positions can run."""
        return context


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Linear scaling: all frequencies are divided by one factor, and the context is multiplied by
    it.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive("the factor of the RoPE scaling", self.factor)

    def scale(
        self, frequencies: NDArray[np.float64], theta: float, length: int
    ) -> NDArray[np.float64]:
        return frequencies / self.factor

    def longest(self, context: int) -> int:
        return stretched(context, self.factor)


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1's scaling: frequencies of slow pairs are divided by a factor, those of fast pairs
    stay, and those between are blended.

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

    def scale(
        self, frequencies: NDArray[np.float64], theta: float, length: int
    ) -> NDArray[np.float64]:
        turns = self.original_context * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        share_kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return frequencies * (share_kept + (1 - share_kept) / self.factor)


@dataclass(frozen=True)
class TableScaling(Scaling):
    """Divides each pair's frequency by a factor of its own. GGUF files store Llama 3.1's scaling in
    this form.
    """

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            check_positive("a factor of the RoPE scaling", factor)

    def scale(
        self, frequencies: NDArray[np.float64], theta: float, length: int
    ) -> NDArray[np.float64]:
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
        is_interleaved: If True, pair i is the elements (2i, 2i + 1) of a head. If False, it is
            (i, i + head_dim / 2).
        scaling: Changes the frequencies. None leaves them as they are.
        attention_factor: Multiplies the cosines and sines.
    """

    theta: float = 10_000.0
    is_interleaved: bool = False
    scaling: Scaling | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("theta of RoPE", self.theta)
        check_positive("attention_factor of RoPE", self.attention_factor)

    def frequencies(self, head_dim: int, length: int = 1) -> NDArray[np.float64]:
        """Returns by how many radians each pair turns from a position to the next, scaled for a
        request of `length` positions: float64 [head_dim / 2].
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        unscaled: NDArray[np.float64] = np.power(float(self.theta), -exponents)
        if self.scaling is None:
            return unscaled
        return self.scaling.scale(unscaled, self.theta, length)

    @property
    def is_fixed(self) -> bool:
        """Tells whether all requests have the same frequencies."""
        return self.scaling is None or self.scaling.reach(1) == math.inf

    def reach(self, length: int, context: int) -> int:
        """Returns the length of the longest request, up to `context`, that has the same frequencies
        as a request of `length` positions. Two requests with equal reach have equal frequencies.
        """
        return int(min(math.inf if self.scaling is None else self.scaling.reach(length), context))

    def longest(self, context: int) -> int:
        """Returns the most positions that a model trained for `context` positions can run."""
        return context if self.scaling is None else self.scaling.longest(context)
