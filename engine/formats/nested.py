"""Formats of the monokernel for GGUF's blocks that it does not multiply as they are stored. Scales
have two levels: a block has two FP16 factors, and the scales of its parts are integers.

    weight = (integer - zero) * (factor * scale) - subtrahend * minimum

A block is stored as

    factor, subtrahend | scales | minimums | lower 4 bits of the integers | upper bits

A scale, from -128 to 127, belongs to 32 columns in blocks of 4 bits and to 16 in blocks of 6 bits.
A minimum, from 0 to 127, belongs to 32. In 32 columns, byte i of the lower bits has the integers of
columns i and i + 16, and byte i of the upper bits those of columns i, i + 8, i + 16 and i + 24.

Blocks of GGUF are converted without rounding.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from ..base.parts import in_parts
from .base import Format, Stored, tile_bytes
from .blocks32 import Blocks32
from .blocks256 import Blocks256

_TILE: int = lib.kKcclDecodeTileRows
# The bytes of the two factors, and the columns of a minimum.
_FACTORS, _LOWERED = 4, 32
# Bits of an integer -> the columns of a scale, and the integer that means 0.
_SCALED, _ZERO = {4: 32, 6: 16}, {4: 0, 6: 32}
# Format of GGUF, by its name in files -> the fewest bits that hold its integers here.
_HOLDS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 6, "Q5_1": 6, "Q5_K": 6, "Q6_K": 6}
# How many values a thread converts at a time, few enough that they stay in a core's cache.
_AT_ONCE = 1 << 17


class Nested(Format):
    """The format whose blocks have so many columns, and integers so many bits: 4 or 6."""

    word = np.dtype(np.uint8)
    has_minimums = True

    def __init__(self, columns: int, bits: int, rounds: Blocks32 | Blocks256) -> None:
        """Makes a format. `rounds` is the format to which from_values() rounds."""
        self.name, self.family = f"nested{bits}_{columns}", f"nested{bits}"
        self.in_files, self.block = f"NESTED{bits}/{columns}", columns
        self._bits, self._rounds = bits, rounds
        self._scales, self._minimums = columns // _SCALED[bits], columns // _LOWERED
        self._integers_at = _FACTORS + self._scales + self._minimums
        self.words = self._integers_at + columns * bits // 8
        self.tile_bytes, self.scale_bytes = tile_bytes(bits), _TILE * self._integers_at

    def strip_scale_bytes(self, tiles: int) -> int:
        """See Format."""
        scales, minimums = (max(1, tiles * _TILE // each) for each in (_SCALED[self._bits], 32))
        return _TILE * (_FACTORS + scales + minimums)

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format. A damaged factor may give a NaN or an infinity."""
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        values = np.empty((len(blocks), self.block), np.float32)
        at_once = max(1, _AT_ONCE // self.block)

        def dequantise_from(first: int) -> None:
            values[first : first + at_once] = self._numbers(blocks[first : first + at_once])

        in_parts(dequantise_from, len(blocks), at_once)
        return values.reshape(*words.shape[:-1], -1)

    def _numbers(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        ends = np.cumsum([_FACTORS, self._scales, self._minimums, self.block // 2])
        halves, scales, minimums, lower, upper = np.split(blocks, ends, axis=1)
        factors = np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
        pairs = lower.reshape(len(blocks), -1, 1, 16)
        integers = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(blocks), -1, 32)
        if self._bits > 4:
            fours = upper.reshape(len(blocks), -1, 1, 8)
            shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
            integers |= (fours >> shifts & 3).reshape(integers.shape) << 4
        numbers = integers.reshape(len(blocks), -1).astype(np.float32) - _ZERO[self._bits]
        signed = np.ascontiguousarray(scales).view(np.int8).astype(np.float32)
        with np.errstate(all="ignore"):
            # The product of an FP16 number and a scale is exact in FP32.
            numbers *= (factors[:, :1] * signed).repeat(_SCALED[self._bits], axis=1)
            numbers -= (factors[:, 1:] * minimums.astype(np.float32)).repeat(_LOWERED, axis=1)
        return numbers

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. Rounds to a format of GGUF."""
        return self.from_stored(Stored(self._rounds, self._rounds.from_values(values))).words

    def holds(self, stored: Format) -> bool:
        """Tells whether all numbers of a format of GGUF have words here. They may be larger."""
        has_blocks = isinstance(stored, Blocks32 | Blocks256)
        if not has_blocks or _HOLDS.get(stored.in_files, 8) > self._bits:
            return False
        return stored.block % self.block == 0

    def from_stored(self, stored: Stored) -> Stored:
        """See Format. Does not round if this format holds the other one's numbers."""
        if not self.holds(of_file := stored.format):
            return super().from_stored(stored)
        blocks = np.ascontiguousarray(stored.words).reshape(-1, of_file.words)
        times = of_file.block // self.block
        words = np.empty((len(blocks) * times, self.words), np.uint8)
        at_once = max(1, _AT_ONCE // of_file.block)

        def convert_from(first: int) -> None:
            some = self._converted(of_file, blocks[first : first + at_once], times)
            words[first * times : first * times + len(some)] = some

        in_parts(convert_from, len(blocks), at_once)
        return Stored(self, words.reshape(*stored.words.shape[:-1], -1))

    def _converted(
        self, of_file: Format, blocks: NDArray[np.uint8], times: int
    ) -> NDArray[np.uint8]:
        """Converts blocks of a file's format, each to `times` blocks."""
        assert isinstance(of_file, Blocks32 | Blocks256)
        factors, scales, minimums, numbers = of_file.nested(blocks)
        num = len(blocks) * times
        scales = scales.repeat(self._scales * times // scales.shape[1], axis=1)
        zero = np.int8(_ZERO[self._bits])
        integers = (numbers + zero if zero else numbers).view(np.uint8).reshape(num, -1, 32)
        lower = integers & 15 if self._bits > 4 else integers
        parts = [
            factors.repeat(times, axis=0),
            scales.view(np.uint8),
            minimums,
            lower[..., :16] | lower[..., 16:] << 4,
        ]
        if self._bits > 4:
            upper = integers >> 4
            parts.append(
                upper[..., :8]
                | upper[..., 8:16] << 2
                | upper[..., 16:24] << 4
                | upper[..., 24:] << 6
            )
        return np.concatenate([each.reshape(num, -1) for each in parts], axis=1)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. Only the factors can be infinite or NaN."""
        halves = words.reshape(-1, self.words)[:, :_FACTORS]
        return bool(np.isfinite(np.ascontiguousarray(halves).view(np.float16)).all())
