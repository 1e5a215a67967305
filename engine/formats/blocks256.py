"""The base classes of GGUF's K formats, which the host executor multiplies as they are stored. The
monokernel's blocks are converted to formats/nested.py. K formats have blocks of 256 integers. Each
group of 32 or 16 integers has a scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ggml import Ggml
from .quarters import Quarters

_BLOCK = 256


class Blocks256(Ggml):
    """A K format.

    Attributes:
        halves_at: The byte offsets of a block's FP16 numbers, by which scales and minimums are
            multiplied.
        scaled: How many values share a scale.
        scale_dtype: The dtype of scales.
        zero: The integer that means a weight of 0.
        has_minimums: Whether each group of 32 values has a minimum, which is subtracted.
    """

    is_on_host = True
    halves_at: tuple[int, ...]
    scaled: int
    scale_dtype: type[np.integer[Any]]
    zero: int
    has_minimums: bool

    def __init__(self, in_files: str) -> None:
        super().__init__(in_files)
        self.cut = Quarters(self)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. Only FP16 numbers can be infinite or NaN."""
        blocks = words.reshape(-1, self.words)
        return all(
            bool(np.isfinite(np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)).all())
            for at in self.halves_at
        )

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. Implemented here because the package `gguf` does not quantise to these
        formats. A scale maps the largest number to the largest integer. llama.cpp searches for
        better scales.
        """
        rows = np.ascontiguousarray(values, np.float32)
        words = self._quantised(rows.reshape(-1, _BLOCK))
        return words.reshape(*values.shape[:-1], -1)

    def _quantised(self, blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Quantises float32 [blocks, 256], and returns the words."""
        raise NotImplementedError

    def unpacked(self, blocks: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Unpacks uint8 [blocks, words] to a list of uint8 arrays: the FP16 numbers' bytes [blocks,
        bytes], scales [blocks, 256 / scaled], minimums [blocks, 8] if has_minimums, and integers
        [blocks, 256].
        """
        raise NotImplementedError

    def nested(self, blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
        """Unpacks uint8 [blocks, words] to what formats/nested.py stores: the bytes of the factor
        and of the subtrahend [blocks, 4], scales [blocks, 256 / scaled], minimums [blocks, 8], and
        integers less their zero point [blocks, 256].
        """
        halves, scales, *minimums, integers = self.unpacked(blocks)
        if not minimums:
            halves = np.pad(halves, ((0, 0), (0, 2)))
            minimums = [np.zeros((len(blocks), 8), np.uint8)]
        numbers = np.ascontiguousarray(integers).view(np.int8)
        if self.zero:
            numbers = numbers - np.int8(self.zero)
        return halves, np.ascontiguousarray(scales).view(np.int8), minimums[0], numbers


class WithMinimums(Blocks256):
    """Q4_K and Q5_K: each group of 32 integers has a scale and a minimum, of 6 bits each."""

    halves_at, scaled, scale_dtype, zero, has_minimums = (0, 2), 32, np.uint8, 0, True

    def __init__(self, in_files: str, bits: int) -> None:
        self._bits = bits
        super().__init__(in_files)

    def _quantised(self, blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
        groups = blocks.reshape(len(blocks), 8, 32)
        most = (1 << self._bits) - 1
        least = -np.minimum(groups.min(axis=2), 0)
        scale, small, factor = _integers((groups.max(axis=2) + least) / most, 63)
        minimum, small_minimum, subtracts = _integers(least, 63)
        shifted = (groups + minimum[..., None]) / np.where(scale > 0, scale, 1)[..., None]
        integers = np.clip(np.rint(shifted), 0, most).astype(np.uint8)
        pairs = (integers & 15).reshape(len(blocks), 4, 2, 32)
        parts: list[NDArray[Any]] = [factor, subtracts, _packed(small, small_minimum)]
        if self._bits == 5:
            fifths = np.packbits(integers >> 4, axis=1, bitorder="little")
            parts.append(fifths.reshape(len(blocks), -1))
        parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(blocks), -1))
        return np.concatenate(parts, axis=1)

    def unpacked(self, blocks: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """See Blocks256."""
        packed, pairs = blocks[:, 4:16], blocks[:, -128:].reshape(-1, 4, 1, 32)
        lower, upper = packed[:, :8] & 63, packed[:, :8] >> 6 << 4
        scales = np.concatenate([lower[:, :4], packed[:, 8:] & 15 | upper[:, :4]], axis=1)
        minimums = np.concatenate([lower[:, 4:], packed[:, 8:] >> 4 | upper[:, 4:]], axis=1)
        integers = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
        if self._bits == 5:
            shifts = np.arange(8, dtype=np.uint8)[:, None]
            integers = integers | (blocks[:, None, 16:48] >> shifts & 1) << 4
        return [blocks[:, :4], scales, minimums, integers.reshape(len(blocks), -1)]


def _integers(
    numbers: NDArray[np.float32], most: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Rounds each block's numbers, which must be at least 0, to an integer times an FP16 factor
    that the block shares. Integers are from 0 to `most`.

    Returns:
        The rounded numbers, their integers, and the factors' bytes.
    """
    factor = (numbers.max(axis=1, keepdims=True) / most).astype(np.float16)
    wide = factor.astype(np.float32)
    found = np.clip(np.rint(numbers / np.where(wide > 0, wide, 1)), 0, most)
    return found * wide, found.astype(np.uint8), factor.view(np.uint8)


def _packed(scales: NDArray[np.uint8], minimums: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs 8 scales and 8 minimums of 6 bits into 12 bytes."""
    first = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, minimums)]
    last = scales[:, 4:] & 15 | minimums[:, 4:] << 4
    return np.concatenate([*first, last], axis=1)


class Signed(Blocks256):
    """Q6_K: each group of 16 integers has a signed scale of 8 bits."""

    halves_at, scaled, scale_dtype, zero, has_minimums = (208,), 16, np.int8, 32, False

    def _quantised(self, blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
        groups = blocks.reshape(len(blocks), 16, 16)
        scale, small, factor = _integers(np.abs(groups).max(axis=2) / 31, 127)
        by_scale = groups / np.where(scale > 0, scale, 1)[..., None]
        integers = (np.clip(np.rint(by_scale), -32, 31) + 32).astype(np.uint8)
        return self.joined(factor, small, integers)

    def joined(
        self, factors: NDArray[np.uint8], scales: NDArray[Any], integers: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Returns the words of blocks.

        Args:
            factors: The bytes of the FP16 factors [blocks, 2].
            scales: Integers of 8 bits [blocks, 16].
            integers: 32 larger than what they mean, whole blocks of 256.
        """
        fours = integers.reshape(len(factors), 2, 4, 32)
        lower = fours[:, :, :2] & 15 | fours[:, :, 2:] << 4
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        upper = np.bitwise_or.reduce(fours >> 4 << shifts, axis=2)
        parts = (lower, upper, scales.view(np.uint8), factors)
        return np.concatenate([each.reshape(len(factors), -1) for each in parts], axis=1)

    def unpacked(self, blocks: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """See Blocks256."""
        fours = blocks[:, :128].reshape(-1, 2, 2, 32)
        lower = np.concatenate([fours & 15, fours >> 4], axis=2)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
        integers = (lower | upper << 4).reshape(len(blocks), -1)
        return [blocks[:, 208:], blocks[:, 192:208], integers]
