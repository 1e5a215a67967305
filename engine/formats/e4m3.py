"""FP8 e4m3fn with a scale for a group of columns. A number has a sign, 4 bits of exponent, and 3 of
mantissa. None is infinite; two patterns of bits are NaN.
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .groups import Groups, scales_of

MOST = 448.0
"""The largest number."""
_NUMBERS: NDArray[np.float32] = (
    np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
)
_MAGNITUDE = 0x7F
_NAN = 0x7F


class E4m3(Groups):
    """The format with groups of so many columns."""

    family = "e4m3"

    def __init__(self, columns: int) -> None:
        super().__init__("e4m3", "F8_E4M3", columns, 8)

    def numbers(self, weights: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See Groups."""
        numbers: NDArray[np.float32] = _NUMBERS[weights]
        return numbers

    def quantised(
        self, values: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], None]:
        """See Groups."""
        scales = scales_of(np.abs(values).max(axis=1), MOST)
        # A quotient may be just beyond the largest number, which would become NaN.
        numbers = np.clip(values / scales[:, None], -MOST, MOST)
        return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales, None

    def _is_finite(self, groups: NDArray[np.uint8]) -> bool:
        weights = groups[:, self._weights_at :]
        return super()._is_finite(groups) and not ((weights & _MAGNITUDE) == _NAN).any()


E4M3 = tuple(map(E4m3, (128, 32)))
"""The formats, that with the fewest scales first."""
