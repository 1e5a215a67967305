"""GGUF's formats: blocks of integers with scales. The package `gguf` converts them to FP32."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..base.extras import library
from .base import Format

# How many values are dequantised at a time, so that their FP32 copy stays small.
_CHUNK = 1 << 20


class Ggml(Format):
    """One of GGUF's quantised formats."""

    word = np.dtype(np.uint8)

    def __init__(self, in_files: str) -> None:
        self.name, self.in_files = in_files.lower(), in_files

    @property
    def _type(self) -> Any:
        return library("gguf.constants").GGMLQuantizationType[self.in_files]

    @property
    def block(self) -> int:  # type: ignore[override]
        """Returns the number of values of a block."""
        return int(library("gguf.constants").GGML_QUANT_SIZES[self._type][0])

    @property
    def words(self) -> int:  # type: ignore[override]
        """Returns the bytes of a block."""
        return int(library("gguf.constants").GGML_QUANT_SIZES[self._type][1])

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format. A damaged scale may give a NaN or an infinity."""
        flat = np.ascontiguousarray(words).reshape(-1)
        with np.errstate(all="ignore"):
            values = library("gguf").quants.dequantize(flat, self._type)
        return np.asarray(values, np.float32).reshape(*words.shape[:-1], -1)

    def values(self, words: NDArray[Any]) -> NDArray[Any]:
        """Returns the numbers in BF16. Conversions to other formats start from these."""
        flat = np.ascontiguousarray(words).reshape(-1)
        values = np.empty(flat.size // self.words * self.block, ml_dtypes.bfloat16)
        at_once = _CHUNK // self.block
        for first in range(0, flat.size // self.words, at_once):
            some = flat[first * self.words : (first + at_once) * self.words]
            # A number that is too large for BF16 becomes infinite. The caller must check for that.
            with np.errstate(all="ignore"):
                start = first * self.block
                dequantised = self.to_float32(some)
                values[start : start + dequantised.size] = dequantised
        return values.reshape(*words.shape[:-1], -1)
