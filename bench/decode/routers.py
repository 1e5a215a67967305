"""Which experts a reference takes, so that it can be compared with an engine that routes otherwise.

Where two experts' logits are closer than the logits' errors, an engine may choose the other one.
That is no error, but all that follows differs. So the reference takes the engine's choice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl
from kccl.engine import Engine
from kccl.engine.model.experts import Experts

# Logits count as equal if they differ by less than this fraction of the layer's largest logit, or
# by less than _CLOSE if that is more. It is the margin of tokens if keys and values are F16
# (tokens.py).
_CLOSE_SHARE, _CLOSE = 2.0**-7, 1e-2


def routers_of(engine: Engine, experts: Experts | None, ids: Sequence[int]) -> Routers | None:
    """Returns what an engine's routers choose for some ids; None: the model has no experts, or the
    engine's ranks are processes, which do not tell it. Collective.
    """
    has_processes = engine.world_size > 1 and kccl.launched_rank() is not None
    return None if experts is None or has_processes else Routers(experts, engine.routed(ids))


class Routers:
    """The choices of experts in one run of a reference.

    Args:
        experts: The model's experts.
        engine: The engine's logits, float32 [layers, positions, experts].

    Attributes:
        num: The number of choices.
        close: How many have a chosen and another expert whose logits count as equal.
        taken: How many of these are the engine's, because its choice differs.
        wrong: In how many the engine chose an expert whose logit is smaller by more. The reference
            takes its own choice there.
        bound: The largest difference at which logits counted as equal.
        error: The largest error of an engine's logit, as a share of its layer's largest logit.
    """

    def __init__(self, experts: Experts, engine: NDArray[np.float32]) -> None:
        self._experts, self._engine = experts, engine
        self.num = self.close = self.taken = self.wrong = 0
        self.bound = self.error = 0.0

    def choose(
        self, layer: int, first: int, logits: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns the experts of some positions of a layer and their weights, as Experts.choose().

        Args:
            layer: The layer.
            first: The first position.
            logits: The reference's logits, [positions, experts].
        """
        experts, engine = self._experts, self._engine[layer, first : first + len(logits)]
        most = float(np.abs(logits).max())
        bound = max(_CLOSE, _CLOSE_SHARE * most)
        ids, _ = experts.choose(logits)
        theirs, _ = experts.choose(engine)
        of_ids = np.take_along_axis(logits, ids, axis=-1)
        least = of_ids.min(-1)
        others = logits.copy()
        np.put_along_axis(others, ids, -np.inf, axis=-1)
        differs = (ids != theirs).any(-1)
        falls_short = least - np.take_along_axis(logits, theirs, axis=-1).min(-1)
        is_taken = differs & (falls_short < bound)
        self.num += len(ids)
        self.close += int((least - others.max(-1) < bound).sum())
        self.taken += int(is_taken.sum())
        self.wrong += int((differs & ~is_taken).sum())
        self.bound = max(self.bound, bound)
        self.error = max(self.error, float(np.abs(engine - logits).max()) / most)
        ids = np.where(is_taken[:, None], theirs, ids)
        return ids, experts.weights_of(logits, ids)

    def __str__(self) -> str:
        return (
            f"of {self.num} choices of experts {self.taken} are taken from KCCL, and "
            f"{self.wrong} are wrong; {self.close} have logits within {self.bound:.3f}, and KCCL's "
            f"logits differ by {self.error:.1e} of the largest at most"
        )
