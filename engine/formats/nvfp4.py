"""NVFP4: floats of 4 bits (e2m1.py). Each 16 columns have a scale in e4m3, and the whole matrix has
a factor in FP32: weight = number * (scale * factor).

The engine repeats the factor for each group of columns, so that some rows, or some lanes of them,
can be read alone. A group is stored as

    factor in FP32 | a scale, a byte, for each 16 columns | numbers, in the order of e2m1.py
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from . import e2m1
from .base import Format, tile_bytes
from .e4m3 import MOST
from .groups import scales_of

SCALED = 16
"""The columns that share a scale."""
_FACTOR_BYTES = 4
_TILE: int = lib.kKcclDecodeTileRows
# The largest e2m1 number, and the smallest e4m3 scale above 0.
_LARGEST, _SMALLEST = 6.0, 2.0**-9
# How many values are converted at a time, so that copies of them stay small.
_CHUNK = 1 << 20


class Nvfp4(Format):
    """NVFP4 whose factor is repeated for each group of `columns` columns."""

    word = np.dtype(np.uint8)
    is_on_host = True
    family = "nvfp4"
    # Packed, a tile has a scale for each row, and a strip a factor.
    tile_bytes, scale_bytes = tile_bytes(4) + _TILE, _FACTOR_BYTES * _TILE

    def __init__(self, columns: int) -> None:
        self.name, self.in_files, self.block = f"nvfp4_{columns}", f"NVFP4/{columns}", columns
        self._numbers_at = _FACTOR_BYTES + columns // SCALED
        self.words = self._numbers_at + columns // 2

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format. A damaged scale or factor may give a NaN or an infinity."""
        groups = np.ascontiguousarray(words).reshape(-1, self.words)
        bytes_of = groups[:, self._numbers_at :].reshape(len(groups), -1, 1, 16)
        codes = np.concatenate([bytes_of & 15, bytes_of >> 4], axis=2)
        values: NDArray[np.float32] = e2m1.NUMBERS[codes]
        with np.errstate(all="ignore"):
            values *= self._scales(groups).reshape(len(groups), -1, 2, 1)
        return values.reshape(*words.shape[:-1], -1)

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. A group's factor makes its largest scale e4m3's largest number."""
        groups = np.ascontiguousarray(values, np.float32).reshape(-1, self.block // SCALED, SCALED)
        most = np.abs(groups).max(axis=2)
        factors = scales_of(most.max(axis=1), _LARGEST * MOST)
        with np.errstate(all="ignore"):
            wanted = np.clip(most / (_LARGEST * factors[:, None]), _SMALLEST, MOST)
            scales = wanted.astype(ml_dtypes.float8_e4m3fn)
            codes = e2m1.rounded(groups / (scales.astype(np.float32) * factors[:, None])[..., None])
        codes[..., 0::2] |= codes[..., 1::2] << 4
        words = self._joined(codes[..., 0::2].reshape(-1, 16), scales.view(np.uint8), factors)
        return words.reshape(*values.shape[:-1], -1)

    def joined(
        self,
        pairs: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        factor: np.float32,
    ) -> NDArray[np.uint8]:
        """Converts rows from the layout of Hugging Face's files to words.

        Args:
            pairs: The numbers, [rows, columns / 2]: byte i has columns 2 i and 2 i + 1.
            scales: The scales, [rows, columns / 16] bytes of e4m3.
            factor: The matrix's factor.
        """
        of_groups = scales.reshape(-1, self.block // SCALED)
        words = self._joined(pairs.reshape(-1, 16), of_groups, factor)
        return words.reshape(len(scales), -1)

    def _joined(
        self,
        pairs: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        factors: NDArray[np.float32] | np.float32,
    ) -> NDArray[np.uint8]:
        """Returns the words of groups. Each row of `pairs` has 32 columns, and each row of `scales`
        those of a group.
        """
        num = len(scales)
        words = np.empty((num, self.words), np.uint8)
        of_factors = np.broadcast_to(np.asarray(factors, np.float32), num).reshape(num, 1)
        words[:, :_FACTOR_BYTES] = np.ascontiguousarray(of_factors).view(np.uint8)
        words[:, _FACTOR_BYTES : self._numbers_at] = scales
        at_once, blocks = _CHUNK // self.block, self.block // 32
        for first in range(0, num, at_once):
            some = pairs[first * blocks : (first + at_once) * blocks]
            numbers = e2m1.reordered(some).reshape(-1, self.block // 2)
            words[first : first + at_once, self._numbers_at :] = numbers
        return words

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format."""
        groups = np.ascontiguousarray(words).reshape(-1, self.words)
        at_once = max(1, _CHUNK // self.block)
        return all(
            bool(np.isfinite(self._scales(groups[first : first + at_once]) * e2m1.NUMBERS[7]).all())
            for first in range(0, len(groups), at_once)
        )

    def _scales(self, groups: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Returns the products of scales and factors, [groups, scales of a group]."""
        factors = np.ascontiguousarray(groups[:, :_FACTOR_BYTES]).view(np.float32)
        stored = np.ascontiguousarray(groups[:, _FACTOR_BYTES : self._numbers_at])
        with np.errstate(all="ignore"):
            scales: NDArray[np.float32] = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            return scales * factors


NVFP4 = tuple(map(Nvfp4, (128, 32)))
"""NVFP4 with groups of 128 and of 32 columns. The first has the fewest copies of the factor."""
