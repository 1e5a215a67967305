"""The small weights of a model, read once for whoever runs it: those of its norms."""

import numpy as np
from numpy.typing import NDArray

from ..model.program import Program
from ..model.rotations import pair_order
from .checkpoint import Checkpoint


def norms_of(checkpoint: Checkpoint, program: Program) -> dict[str, NDArray[np.float32]]:
    """The weights of all RMSNorms, by the names of their tensors, in the order of their use.

    Returns:
        float32 [hidden] each. Those of queries and keys are [head_dim], with the elements side by
        side that RoPE turns together.
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
