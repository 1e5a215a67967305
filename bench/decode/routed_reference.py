"""The NumPy reference with an engine's choices of experts, where they count as equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.program import Op

from .routers import Routers

Array = NDArray[Any]


class RoutedReference(Reference):
    """A Reference that chooses by `routers`, while that is not None."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.routers: Routers | None = None
        self._choice: tuple[Array, Array] | None = None

    def _router(self, op: Op, run: Any, bias: Sequence[Array], norm: Array, router: Array) -> Array:
        logits = super()._router(op, run, bias, norm, router)
        self._choice = None
        if self.routers is not None:
            self._choice = self.routers.choose(op.layer, run.cache.length, logits[0])
        return logits

    def _chosen(self, run: Any) -> tuple[Array, Array]:
        return super()._chosen(run) if self._choice is None else self._choice
