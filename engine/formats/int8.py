"""Integers of 8 bits with a scale for a group of columns: weight = integer * scale, or with zero
points (integer - zero point) * scale.

Without zero points an integer has a sign. With them it has none, and neither have they.
"""

import numpy as np
from numpy.typing import NDArray

from .groups import Groups, scales_of

_MOST = 127
_MOST_UNSIGNED = 255


class Int8(Groups):
    """The format with groups of so many columns."""

    family = "int8"

    def __init__(self, columns: int, *, has_zeros: bool) -> None:
        self.has_zeros = has_zeros
        name, in_files = ("int8_zeros", "INT8+zero") if has_zeros else ("int8", "INT8")
        super().__init__(name, in_files, columns, 8)

    def numbers(self, weights: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See Groups."""
        return (weights if self.has_zeros else weights.view(np.int8)).astype(np.float32)

    def quantised(
        self, values: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8] | None]:
        """See Groups."""
        if self.has_zeros:
            least = np.minimum(values.min(axis=1), 0)
            scales = scales_of(np.maximum(values.max(axis=1), 0) - least, _MOST_UNSIGNED)
            zeros = np.rint(-least / scales)
            integers = np.rint(values / scales[:, None]) + zeros[:, None]
            unsigned = np.clip(integers, 0, _MOST_UNSIGNED).astype(np.uint8)
            return unsigned, scales, zeros.astype(np.uint8)
        scales = scales_of(np.abs(values).max(axis=1), _MOST)
        numbers = np.clip(np.rint(values / scales[:, None]), -_MOST, _MOST)
        return numbers.astype(np.int8).view(np.uint8), scales, None


INT8 = tuple(Int8(columns, has_zeros=False) for columns in (128, 32))
"""The formats without zero points, that with the fewest scales first."""
INT8_ZEROS = tuple(Int8(columns, has_zeros=True) for columns in (128, 32))
"""Those with zero points."""
