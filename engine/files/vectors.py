"""Reads the weights of a model's norms, in the form in which executors use them."""

import numpy as np
from numpy.typing import NDArray

from ..model.program import Program
from ..model.rotations import pair_order
from .checkpoint import Checkpoint


def norms_of(checkpoint: Checkpoint, program: Program) -> dict[str, NDArray[np.float32]]:
    """Reads the weights of all RMSNorms.

    Returns:
        Tensor -> float32 [hidden], in the order in which ops use them. The norms of queries and
        keys are [head_dim], reordered so that the two elements of a RoPE pair are neighbours.
    """
    c = program.config
    order = pair_order(c.head_dim, is_interleaved=c.rope.is_interleaved)

    def read(name: str) -> NDArray[np.float32]:
        return np.ascontiguousarray(checkpoint.tensor(name), np.float32)

    found: dict[str, NDArray[np.float32]] = {}
    for op in program.ops:
        found |= {name: read(name) for name in op.norms()}
        found |= {name: read(name)[order] for name in op.head_norms()}
    return found
