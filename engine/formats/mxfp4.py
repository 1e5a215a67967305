"""MXFP4 of the Open Compute Project: blocks of 32 floats of 4 bits (e2m1.py) with a power of two as
the scale.

A scale is a byte, e8m0: it means 2^(byte - 127), and 255 means NaN. A block is stored as in GGUF
files: its scale, then 16 bytes. Byte i has the number of column i in its lower half, and that of
column i + 16 in its upper half. GGUF's software takes the numbers for twice as large and the scales
for half as large, so the weights are the same.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from . import e2m1
from .base import tile_bytes
from .ggml import Ggml
from .int4 import halved

_BIAS, _NAN = 127, 255
_TILE: int = lib.kKcclDecodeTileRows
_TILE_BYTES = tile_bytes(4)
# The exponent of 6, the largest number of e2m1; and the largest scale byte for which 6 * scale is
# finite in FP32.
_MOST_EXPONENT, SAFE = 2, 252
# How many values are converted at a time, so that copies of them stay small.
_CHUNK = 1 << 20


class Mxfp4(Ggml):
    """The format MXFP4. FP32 and BF16 represent each of its finite numbers exactly."""

    is_on_host = True
    tile_bytes, scale_bytes = _TILE_BYTES, _TILE
    # Set here, because Hugging Face's files are read without the package gguf.
    block, words = 32, 17

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format. A number too large for FP32 becomes infinite. If a block's scale is NaN, so
        are its numbers.
        """
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        codes = np.empty((len(blocks), 2, 16), np.uint8)
        np.bitwise_and(blocks[:, 1:], 15, out=codes[:, 0])
        np.right_shift(blocks[:, 1:], 4, out=codes[:, 1])
        values: NDArray[np.float32] = e2m1.NUMBERS[codes]
        with np.errstate(all="ignore"):
            values *= _powers(blocks[:, 0])[:, None, None]
        return values.reshape(*words.shape[:-1], words.shape[-1] // self.words * self.block)

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. Converts as the specification says. A block's scale follows from the largest
        power of two that is not above its largest number. Ties are rounded to an even mantissa.
        Numbers that would round beyond the largest one become the largest one. If a block has a
        NaN or an infinity, its scale becomes NaN.
        """
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, self.block)
        words = np.empty((len(rows), self.words), np.uint8)
        at_once = _CHUNK // self.block
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            words[some, 0], codes = _rounded(rows[some])
            words[some, 1:] = halved(codes)
        return words.reshape(*values.shape[:-1], -1)

    def to_pairs(self, values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Rounds rows as from_values() does, to the layout of Hugging Face's files.

        Args:
            values: [rows, columns].

        Returns:
            The numbers, uint8 [rows, columns / 2], with columns 2 i and 2 i + 1 in byte i; and the
            scales, uint8 [rows, blocks].
        """
        scales, codes = _rounded(values.reshape(-1, self.block))
        codes[:, 0::2] |= codes[:, 1::2] << 4
        return codes[:, 0::2].reshape(len(values), -1), scales.reshape(len(values), -1)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. A scale may be NaN, or so large that numbers are beyond FP32's."""
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        large = blocks[blocks[:, 0] > SAFE]
        return bool(np.isfinite(self.to_float32(large)).all())

    def from_pairs(self, blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Converts a tensor from the layout of Hugging Face's files, as gpt-oss's: byte i of a
        block has column 2 i in its lower half and column 2 i + 1 in its upper half.

        Args:
            blocks: uint8 [..., blocks of a row, 16], with any strides.
            scales: uint8 [..., blocks of a row].

        Returns:
            uint8 [..., words of a row], in new memory.

        Raises:
            ValueError: There is not one scale for each block, or blocks do not have 16 bytes.
        """
        *rows, num_blocks, num_bytes = blocks.shape
        if scales.shape != (*rows, num_blocks) or num_bytes != self.words - 1:
            raise ValueError(f"blocks {blocks.shape} do not fit scales {scales.shape}")
        flat = blocks.reshape(-1, num_bytes)
        words = np.empty((len(flat), self.words), np.uint8)
        words[:, 0] = scales.reshape(-1)
        at_once = _CHUNK // self.block
        for first in range(0, len(flat), at_once):
            some = slice(first, first + at_once)
            # NumPy copies items of 16 bytes twice as fast as single bytes.
            words[some, 1:].view("V16")[:] = e2m1.reordered(flat[some]).view("V16")
        return words.reshape(*rows, num_blocks * self.words)


def _powers(scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns the powers of two that scale bytes mean. 2^-127 is subnormal in FP32, but exact."""
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    return np.where(scales == _NAN, np.float32(np.nan), powers)


def _rounded(blocks: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rounds float32 [blocks, 32]. Returns the scales, uint8 [blocks], and the codes, uint8
    [blocks, 32].
    """
    most = np.abs(blocks).max(axis=1)
    is_finite = np.isfinite(most)
    # For a number x, frexp() gives 1 + the exponent of the largest power of two not above x. For 0
    # it gives 0.
    exponents = np.frexp(np.where(is_finite, most, 0))[1] - 1 - _MOST_EXPONENT
    exponents = np.where(most == 0, -_BIAS, np.maximum(exponents, -_BIAS))
    codes = e2m1.rounded(np.ldexp(blocks, -exponents[:, None]))
    codes[~is_finite] = 0
    scales = np.where(is_finite, exponents + _BIAS, _NAN).astype(np.uint8)
    return scales, codes


MXFP4 = Mxfp4("MXFP4")
