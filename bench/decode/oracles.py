"""Which reference checks an engine's tokens."""

from __future__ import annotations

import kccl
from kccl.engine.files.checkpoint import Checkpoint

from .tokens import NumpyOracle, Oracle


def open_oracle(checkpoint: Checkpoint, backend: str, notes: list[str]) -> Oracle:
    """Returns the reference for an engine on a backend. A mixture of experts on a GPU is compared
    with PyTorch's, layer by layer: a large one takes the NumPy reference minutes. Adds to `notes`
    which it is, or why that cannot be, once however often it is called.
    """
    if checkpoint.config.experts is None or backend not in ("cuda", "hip"):
        return NumpyOracle(checkpoint)
    try:
        from .pytorch.reference import LayerByLayer

        oracle = LayerByLayer(checkpoint, "cuda")
    except (ImportError, kccl.Error) as error:
        _note(notes, f"a mixture is checked in NumPy, which takes long: {error}")
        return NumpyOracle(checkpoint)
    _note(notes, "a mixture is checked in PyTorch, layer by layer")
    return oracle


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
