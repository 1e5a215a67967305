"""Integers of 4 bits with a scale for a group of columns: weight = (integer - 8) * scale, or with
zero points (integer - zero point) * scale.

In 32 columns, byte i has the integer of column i in its lower half, and that of column i + 16 in
its upper half.
"""

import numpy as np
from numpy.typing import NDArray

from .groups import Groups, scales_of

ZERO = 8
"""The integer of a weight of 0 without zero points."""
_MOST = 15


class Int4(Groups):
    """The format with groups of so many columns."""

    family = "int4"

    def __init__(self, columns: int, *, has_zeros: bool) -> None:
        self.has_zeros = has_zeros
        name, in_files = ("int4_zeros", "INT4+zero") if has_zeros else ("int4", "INT4")
        super().__init__(name, in_files, columns, 4)

    def numbers(self, weights: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See Groups."""
        blocks = weights.reshape(*weights.shape[:-1], -1, 1, 16)
        halves = np.concatenate([blocks & 15, blocks >> 4], axis=-2)
        integers = halves.reshape(*weights.shape[:-1], -1).astype(np.float32)
        return integers if self.has_zeros else integers - np.float32(ZERO)

    def quantised(
        self, values: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8] | None]:
        """See Groups."""
        zeros = None
        if self.has_zeros:
            least = np.minimum(values.min(axis=1), 0)
            scales = scales_of(np.maximum(values.max(axis=1), 0) - least, _MOST)
            zeros = np.rint(-least / scales).astype(np.uint8)
            integers = np.rint(values / scales[:, None]) + zeros[:, None]
        else:
            scales = scales_of(np.abs(values).max(axis=1), ZERO - 1)
            integers = np.rint(values / scales[:, None]) + ZERO
        return halved(np.clip(integers, 0, _MOST).astype(np.uint8)), scales, zeros


def halved(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns integers below 16 as they are stored, two in a byte.

    Args:
        integers: [rows, columns], whole blocks of 32 columns.
    """
    blocks = integers.reshape(len(integers), -1, 2, 16)
    halves = blocks[:, :, 0] | blocks[:, :, 1] << 4
    return halves.astype(np.uint8).reshape(len(integers), -1)


INT4 = tuple(Int4(columns, has_zeros=False) for columns in (128, 64, 32))
"""The formats without zero points, that with the fewest scales first."""
INT4_ZEROS = tuple(Int4(columns, has_zeros=True) for columns in (128, 64, 32))
"""Those with zero points."""
