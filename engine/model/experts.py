"""The rule of a mixture of experts: which experts of a layer a position uses, and their weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument

from ..base.core import lib

SWISH = 1.702
"""The factor in gpt-oss's sigmoid(SWISH * gate)."""
MOST_EXPERTS: int = lib.kKcclEngineMaxExperts
MOST_CHOSEN: int = lib.kKcclEngineMaxChosen


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of each layer.

    A router gives each expert a logit. A position uses the experts with the largest logits. Of two
    experts with equal logits, the one with the lower id comes first. Each chosen expert's output is
    multiplied by its weight, and these products are added up in the order of the experts' ids.

    Attributes:
        num: The experts of a layer.
        chosen: How many experts a position uses.
        is_normalised: If True, the weights are the softmax over the chosen experts' logits. If
            False, they are the softmax over all experts' logits, so they add up to less than 1.

    Raises:
        InvalidArgument: A field is out of range.
    """

    num: int
    chosen: int
    is_normalised: bool = True

    def __post_init__(self) -> None:
        most = min(MOST_CHOSEN, self.num)
        for name, value, limit in (("num", self.num, MOST_EXPERTS), ("chosen", self.chosen, most)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InvalidArgument(
                    f"experts.{name} is {value!r}, must be an integer from 1 to {limit}"
                )
        if not isinstance(self.is_normalised, bool):
            told = f"experts.is_normalised is {self.is_normalised!r}, must be True or False"
            raise InvalidArgument(told)

    def choose(self, logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the chosen experts of each position, in ascending order, and their weights.

        Args:
            logits: The router's logits, float32 [..., num].

        Returns:
            Ids and weights, [..., chosen] each.
        """
        # A stable sort keeps the lower id before an equal one.
        ids = np.sort(np.argsort(-logits, axis=-1, kind="stable")[..., : self.chosen], axis=-1)
        return ids, self.weights_of(logits, ids)

    def weights_of(self, logits: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the weights of chosen experts, [..., chosen].

        Args:
            logits: As choose() takes them.
            ids: The chosen experts of each position, [..., chosen].
        """
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        of_chosen = np.take_along_axis(powers, ids, axis=-1)
        total = (of_chosen if self.is_normalised else powers).sum(axis=-1, keepdims=True)
        weights: NDArray[np.float32] = of_chosen / total
        return weights
