"""The common base of GGUF's formats of blocks of 32 integers, which the host executor multiplies as
they are stored.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.extras import library
from .ggml import Ggml


class Blocks32(Ggml):
    """A format whose blocks begin with FP16 numbers: the scale, and the minimum if there is one."""

    is_on_host = True

    def __init__(self, in_files: str, *, has_minimums: bool) -> None:
        super().__init__(in_files)
        self._num_scales = 2 if has_minimums else 1

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. A block's scale is that of llama.cpp."""
        rows = np.ascontiguousarray(values, np.float32)
        words = library("gguf").quants.quantize(rows, self._type)
        return np.asarray(words, np.uint8).reshape(*values.shape[:-1], -1)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. Only scales and minimums can be infinite or NaN."""
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        numbers = np.ascontiguousarray(blocks[:, : 2 * self._num_scales]).view(np.float16)
        return bool(np.isfinite(numbers).all())
