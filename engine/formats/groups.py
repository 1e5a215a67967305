"""The common base of formats whose rows are cut into groups of columns, each with a scale in FP32,
which executors multiply as they are stored.

Files keep weights and scales in tensors of their own (files/quantized.py), which are put together
when they are read. A group is stored as

    scale in FP32 | zero point, a byte, if there is one | weights
"""

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from ..base.parts import in_parts
from .base import Format, tile_bytes

_TILE: int = lib.kKcclDecodeTileRows
_SCALE_BYTES = 4
# The number of values that are dequantised at a time, so that their FP32 copy stays small.
_CHUNK = 1 << 20
# The number of values that are rounded or dequantised by a thread at a time, few enough that they
# stay in a core's cache.
_AT_ONCE = 1 << 16


class Groups(Format):
    """A format of groups."""

    word = np.dtype(np.uint8)
    is_on_host = True

    def __init__(self, name: str, in_files: str, columns: int, bits: int) -> None:
        self.name, self.in_files, self.block = f"{name}_{columns}", f"{in_files}/{columns}", columns
        self._weights_at = _SCALE_BYTES + self.has_zeros
        self.words = self._weights_at + columns * bits // 8
        self.tile_bytes, self.scale_bytes = tile_bytes(bits), _TILE * self._weights_at

    @abstractmethod
    def numbers(self, weights: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Returns what the weights of groups mean without scales and zero points.

        Args:
            weights: [..., bytes of the weights of a group].

        Returns:
            float32 [..., values of a group].
        """

    @abstractmethod
    def quantised(
        self, values: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8] | None]:
        """Rounds groups to the nearest numbers of the format.

        Args:
            values: [groups, values of a group], finite.

        Returns:
            The weights, as numbers() takes them; [groups] scales; [groups] zero points if the
            format has them.
        """

    def joined(
        self,
        weights: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zeros: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Returns the words of rows.

        Args:
            weights: [rows, bytes of the weights of a row], without scales.
            scales: [rows, groups of a row].
            zeros: As the scales, if the format has zero points.
        """
        rows, groups = scales.shape
        words = np.empty((rows, groups, self.words), np.uint8)
        of_scales = np.ascontiguousarray(scales, np.float32).view(np.uint8)
        words[..., :_SCALE_BYTES] = of_scales.reshape(rows, groups, _SCALE_BYTES)
        if self.has_zeros:
            assert zeros is not None
            words[..., _SCALE_BYTES] = zeros
        words[..., self._weights_at :] = weights.reshape(rows, groups, -1)
        return words.reshape(rows, -1)

    def apart(self, words: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Takes the words of a format without zero points apart.

        Args:
            words: [..., words of a row].

        Returns:
            The weights, [..., groups of a row, bytes of the weights of a group], and the scales,
            [..., groups of a row, 1].
        """
        groups = words.reshape(*words.shape[:-1], -1, self.words)
        scales = np.ascontiguousarray(groups[..., :_SCALE_BYTES]).view(np.float32)
        return np.ascontiguousarray(groups[..., self._weights_at :]), scales

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format. A damaged scale may give a NaN or an infinity."""
        groups = np.ascontiguousarray(words).reshape(-1, self.words)
        values = np.empty((len(groups), self.block), np.float32)
        at_once = max(1, _AT_ONCE // self.block)

        def dequantise_from(first: int) -> None:
            some = groups[first : first + at_once]
            numbers = self.numbers(some[:, self._weights_at :])
            if self.has_zeros:
                numbers = numbers - some[:, _SCALE_BYTES, None].astype(np.float32)
            with np.errstate(all="ignore"):
                np.multiply(
                    numbers, self._scales(some)[:, None], out=values[first : first + at_once]
                )

        in_parts(dequantise_from, len(groups), at_once)
        return values.reshape(*words.shape[:-1], -1)

    def values(self, words: NDArray[Any]) -> NDArray[Any]:
        """See Format. This is FP32, from which every other format is made."""
        return self.to_float32(words)

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. A group's largest number, or its range, decides its scale."""
        rows = values.reshape(-1, values.shape[-1])
        words = np.empty((len(rows), self.words_of(rows.shape[1])), np.uint8)
        at_once = max(1, _AT_ONCE // rows.shape[1])

        def round_from(first: int) -> None:
            some = np.ascontiguousarray(rows[first : first + at_once], np.float32)
            weights, scales, zeros = self.quantised(some.reshape(-1, self.block))
            shape = len(some), -1
            words[first : first + at_once] = self.joined(
                weights.reshape(shape),
                scales.reshape(shape),
                None if zeros is None else zeros.reshape(shape),
            )

        in_parts(round_from, len(rows), at_once)
        return words.reshape(*values.shape[:-1], -1)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format."""
        flat = np.ascontiguousarray(words).reshape(-1, self.words)
        at_once = max(1, _CHUNK // self.block)
        return all(
            self._is_finite(flat[first : first + at_once]) for first in range(0, len(flat), at_once)
        )

    def _is_finite(self, groups: NDArray[np.uint8]) -> bool:
        return bool(np.isfinite(self._scales(groups)).all())

    def _scales(self, groups: NDArray[np.uint8]) -> NDArray[np.float32]:
        return np.ascontiguousarray(groups[:, :_SCALE_BYTES]).view(np.float32)[:, 0]


def scales_of(largest: NDArray[np.float32], most: float) -> NDArray[np.float32]:
    """Returns the scales with which groups' largest numbers become `most`. It is 1 for zeros, and
    NaN for a group with NaN.
    """
    scales = (largest / np.float32(most)).astype(np.float32)
    return np.where(scales == 0, np.float32(1), scales)
