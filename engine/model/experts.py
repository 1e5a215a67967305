"""The rule of a mixture of experts: which feed-forward blocks of a layer a position passes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kccl import InvalidArgument

from ..base.core import lib

SWISH = 1.702
"""What gpt-oss multiplies the gate by within the sigmoid."""
MOST_EXPERTS: int = lib.kKcclEngineMaxExperts
MOST_CHOSEN: int = lib.kKcclEngineMaxChosen


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of each layer.

    A router gives each expert a logit. A position passes the experts with the largest logits; of
    equal logits the one with the lower id is chosen. Their outputs are added up in the order of
    their ids, each times its weight.

    Attributes:
        num: The experts of a layer.
        chosen: The experts that a position passes.
        is_normalised: Whether the weights of the chosen experts are the softmax over their logits.
            Otherwise they are those of the softmax over all experts, and add up to less than 1.

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
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        of_chosen = np.take_along_axis(powers, ids, axis=-1)
        total = (of_chosen if self.is_normalised else powers).sum(axis=-1, keepdims=True)
        return ids, of_chosen / total
