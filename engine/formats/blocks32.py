"""The common base of GGUF's formats of blocks of 32 integers. The host executor multiplies all of
them as they are stored, the monokernel those with tile_bits; it multiplies the others in the forms
of formats/nested.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from ..base.extras import library
from .base import tile_bytes
from .ggml import Ggml

_TILE: int = lib.kKcclDecodeTileRows


class Blocks32(Ggml):
    """A format whose blocks begin with FP16 numbers: the scale, and the minimum if there is one."""

    is_on_host = True

    def __init__(self, in_files: str, *, has_minimums: bool, tile_bits: int = 0) -> None:
        """Makes a format.

        Args:
            in_files: Its name in files.
            has_minimums: Whether a block has a minimum.
            tile_bits: The bits of an integer as the monokernel packs it, with the scale in FP16; 0:
                it does not multiply the format.
        """
        super().__init__(in_files)
        self._num_scales = 2 if has_minimums else 1
        self.tile_bytes = tile_bytes(tile_bits)
        self.scale_bytes = 2 * _TILE if tile_bits else 0

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. A block's scale is that of llama.cpp."""
        rows = np.ascontiguousarray(values, np.float32)
        words = library("gguf").quants.quantize(rows, self._type)
        return np.asarray(words, np.uint8).reshape(*values.shape[:-1], -1)

    def nested(self, blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
        """Unpacks uint8 [blocks, words] to what formats/nested.py stores: the bytes of the factor
        and of the subtrahend [blocks, 4], a scale and a minimum [blocks, 1], and integers less
        their zero point [blocks, 32]. Each scale is 1.
        """
        halves = np.zeros((len(blocks), 2), np.float16)
        halves[:, : self._num_scales] = np.ascontiguousarray(
            blocks[:, : 2 * self._num_scales]
        ).view(np.float16)
        pairs = blocks[:, -16:]
        integers = np.concatenate([pairs & 15, pairs >> 4], axis=1)
        ones, zero = np.ones((len(blocks), 1), np.int8), 0
        if blocks.shape[1] > 2 * self._num_scales + pairs.shape[1]:
            fifths = np.ascontiguousarray(blocks[:, -20:-16])
            integers |= np.unpackbits(fifths, axis=1, bitorder="little") << 4
            zero = 0 if self._num_scales > 1 else 16
        minimums = ones.view(np.uint8)
        if self._num_scales > 1:
            # Files have a minimum that is added.
            halves[:, 1] = -halves[:, 1]
        elif zero == 0:
            # (integer - 8) * factor is integer * factor - factor * 8.
            halves[:, 1], minimums = halves[:, 0], 8 * minimums
        return halves.view(np.uint8), ones, minimums, integers.astype(np.int8) - np.int8(zero)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format. Only scales and minimums can be infinite or NaN."""
        blocks = np.ascontiguousarray(words).reshape(-1, self.words)
        numbers = np.ascontiguousarray(blocks[:, : 2 * self._num_scales]).view(np.float16)
        return bool(np.isfinite(numbers).all())
