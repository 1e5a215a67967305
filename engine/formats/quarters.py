"""The K formats of GGUF in blocks of 64 columns. In a file their blocks have 256 columns. If a lane
of a matrix ends within such a block, its weights are stored in quarters of blocks instead. Each
quarter has a copy of its block's FP16 numbers, so nothing is rounded.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .base import Format, Stored

if TYPE_CHECKING:
    from .blocks256 import Blocks256

_BLOCK, _SCALED = 64, 32


class Quarters(Format):
    """The quarters of a K format's blocks. The words of a quarter are the FP16 numbers, the scales,
    the minimums if the format has them, and the integers. Each but the FP16 numbers is a byte.
    """

    word = np.dtype(np.uint8)
    block = _BLOCK
    is_on_host = True

    def __init__(self, whole: "Blocks256") -> None:
        self._whole = whole
        self.name, self.in_files = f"{whole.name}_{_BLOCK}", whole.in_files
        self._halves = 2 * len(whole.halves_at)
        self._scales = _BLOCK // whole.scaled
        self._minimums = _BLOCK // _SCALED if whole.has_minimums else 0
        self.words = self._halves + self._scales + self._minimums + _BLOCK

    def bytes_of(self, num_values: int) -> int:
        """Returns the bytes that `num_values` values take in the file."""
        return num_values * self._whole.words // self._whole.block

    def from_stored(self, stored: Stored) -> Stored:
        """See Format. Unpacks the K format without rounding. Converts others as usual."""
        if stored.format is not self._whole:
            return super().from_stored(stored)
        blocks = np.ascontiguousarray(stored.words).reshape(-1, self._whole.words)
        halves, *of_quarters = self._whole.unpacked(blocks)
        parts = [np.broadcast_to(halves[:, None], (len(blocks), 4, self._halves))]
        parts += [each.reshape(len(blocks), 4, -1) for each in of_quarters]
        words = np.concatenate(parts, axis=2)
        return Stored(self, words.reshape(*stored.words.shape[:-1], -1))

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format."""
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        ends = np.cumsum([self._halves, self._scales, self._minimums])
        halves, scales, minimums, integers = np.split(blocks, ends, axis=1)
        factors = np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
        signed = np.ascontiguousarray(scales).view(self._whole.scale_dtype)
        # The product of an FP16 number and a scale is exact in FP32.
        by = (factors[:, :1] * signed.astype(np.float32)).repeat(self._whole.scaled, axis=1)
        values = (integers.astype(np.float32) - self._whole.zero) * by
        if self._minimums:
            values -= (factors[:, 1:] * minimums.astype(np.float32)).repeat(_SCALED, axis=1)
        return values.reshape(*words.shape[:-1], -1)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. Only FP16 numbers can be infinite or NaN."""
        halves = words.reshape(-1, self.words)[:, : self._halves]
        return bool(np.isfinite(np.ascontiguousarray(halves).view(np.float16)).all())
