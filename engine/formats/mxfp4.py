"""MXFP4 of the Open Compute Project: blocks of 32 floats of 4 bits (e2m1.py) with a power of two as
the scale.

A scale is a byte, e8m0: it means 2^(byte - 127), and 255 is NaN. A block is stored as in GGUF
files: its scale, then 16 bytes. Byte i has the number of column i in its lower half, and that of
column i + 16 in its upper half. GGUF's software has numbers twice as large and scales half as
large, which means the same.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import e2m1
from .ggml import Ggml
from .int4 import halved

_BIAS, _NAN = 127, 255
# The exponent of the largest number, 6, and the largest scale with which it is finite in FP32.
_MOST_EXPONENT, _SAFE = 2, 252
# The number of values that are converted at a time, so that copies of them stay small.
_CHUNK = 1 << 20


class Mxfp4(Ggml):
    """The format. Each of its finite numbers is one of FP32 and of BF16."""

    is_on_host = True
    # Folders of Hugging Face are read without the package gguf.
    block, words = 32, 17

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format. A number beyond FP32's becomes an infinity; those of a block whose scale is
        NaN are NaN.
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
        """See Format. This is the conversion of the specification: the power of two below a block's
        largest number decides its scale, ties go to an even mantissa, and what would round beyond
        the largest number becomes that. A NaN or an infinity makes its block's scale NaN.
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
        """Rounds rows as from_values() does, for a folder of Hugging Face.

        Args:
            values: [rows, columns].

        Returns:
            uint8 [rows, columns / 2], columns 2 i and 2 i + 1 in byte i; uint8 [rows, blocks].
        """
        scales, codes = _rounded(values.reshape(-1, self.block))
        codes[:, 0::2] |= codes[:, 1::2] << 4
        return codes[:, 0::2].reshape(len(values), -1), scales.reshape(len(values), -1)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. A scale may be NaN, or so large that numbers are beyond FP32's."""
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        large = blocks[blocks[:, 0] > _SAFE]
        return bool(np.isfinite(self.to_float32(large)).all())

    def from_pairs(self, blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the words of a tensor as folders of Hugging Face store it, those of gpt-oss:
        columns 2 i and 2 i + 1 of a block lie in the lower and the upper half of byte i.

        Args:
            blocks: uint8 [..., blocks of a row, 16], with any strides.
            scales: uint8 [..., blocks of a row].

        Returns:
            uint8 [..., words of a row], in new memory.

        Raises:
            ValueError: The scales are not one for each block, or a block has not 16 bytes.
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
            # As items of 16 bytes they are copied at twice the speed.
            words[some, 1:].view("V16")[:] = e2m1.reordered(flat[some]).view("V16")
        return words.reshape(*rows, num_blocks * self.words)


def _powers(scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns what scales mean. 2^-127 is subnormal, and exact."""
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    return np.where(scales == _NAN, np.float32(np.nan), powers)


def _rounded(blocks: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the scales, uint8 [blocks], and the codes, uint8 [blocks, 32], of float32 [blocks,
    32].
    """
    most = np.abs(blocks).max(axis=1)
    is_finite = np.isfinite(most)
    # frexp() gives one more than the exponent of the power of two below a number, and 0 for 0.
    exponents = np.frexp(np.where(is_finite, most, 0))[1] - 1 - _MOST_EXPONENT
    exponents = np.where(most == 0, -_BIAS, np.maximum(exponents, -_BIAS))
    codes = e2m1.rounded(np.ldexp(blocks, -exponents[:, None]))
    codes[~is_finite] = 0
    scales = np.where(is_finite, exponents + _BIAS, _NAN).astype(np.uint8)
    return scales, codes


MXFP4 = Mxfp4("MXFP4")
