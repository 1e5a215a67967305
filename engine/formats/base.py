"""The interface of a format of weights, and a tensor that is stored in a format."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib

_TILE_VALUES: int = lib.kKcclDecodeTileRows * lib.kKcclDecodeTileColumns
# The number of words that are checked at a time, few enough that they are still in the cache.
_CHUNK = 1 << 16


def tile_bytes(bits: int) -> int:
    """Returns Format.tile_bytes of numbers with so many bits."""
    return _TILE_VALUES * bits // 8


class Format(ABC):
    """A format: how numbers are stored. The rows of a tensor are cut into blocks of equally many
    values.

    Attributes:
        name: The engine's name of the format, as in "bfloat16".
        in_files: The name that files use, as in "BF16".
        word: The dtype of a stored word.
        block: The number of values of a block.
        words: The number of words of a block.
        tile_bytes: The bytes of a tile of 16 x 16 values, as the monokernel packs it, without
            scales. 0: the monokernel does not multiply the format as it is stored. Otherwise the
            format has two more files: kernels/formats/NAME.cuh and host/formats/NAME.h.
        family: NAME of these files; "": the format's name. Formats that differ in their blocks
            share them.
        scale_bytes: The bytes of the scales and zero points that a row tile has for each block of
            columns, as the monokernel packs them if a strip has a block; 0: none.
        cut: The format of those tensors whose lanes end within a block; None: they are rounded.
        has_zeros: Whether a block of a format with scales has a zero point for each scale.
        has_minimums: Whether columns of a block have a minimum, which is subtracted.
        forms: The formats that a tensor may become while it is read, if no executor multiplies it
            as it is stored: formats/expanded.py.
        is_on_host: Whether queries, keys and values may have several formats, this one among
            them, and layers different ones, as the host executor has them. If the monokernel does
            not multiply the format, it has one more file: host/formats/NAME.h.
    """

    name: str
    in_files: str
    word: Any
    block: int = 1
    words: int = 1
    tile_bytes: int = 0
    family: str = ""
    scale_bytes: int = 0
    has_zeros: bool = False
    has_minimums: bool = False
    is_on_host: bool = False
    cut: "Format | None" = None
    forms: "tuple[Format, ...]" = ()

    @abstractmethod
    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """Returns the numbers that stored words mean. All executors are compared with it.

        Args:
            words: [..., words of a row].

        Returns:
            float32 [..., values of a row].
        """

    def values(self, words: NDArray[Any]) -> NDArray[Any]:
        """Returns the numbers in the dtype from which they are converted to another format."""
        return self.to_float32(words)

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the words of numbers of any dtype, each rounded to the nearest that the format
        has. Only formats that executors multiply have this.
        """
        raise NotImplementedError(f"no tensor is turned into {self.name}")

    def from_stored(self, stored: "Stored") -> "Stored":
        """Returns a tensor of another format in this one, its numbers as from_values() rounds
        them.
        """
        return Stored(self, self.from_values(stored.values()))

    def form_of(self, given: "Format") -> "Format | None":
        """Returns the one of `forms` to which a format belongs that a tensor is given in. None: it
        belongs to none.
        """
        return None

    def rounding(self, form: "Format") -> str:
        """Returns words that say what is rounded in one of `forms`; "" if nothing is."""
        return ""

    def expanded(self, stored: "Stored", form: "Format") -> "Stored":
        """Returns a tensor of this format in one of `forms`."""
        raise NotImplementedError(f"{self.name} is not expanded")

    def is_finite(self, words: NDArray[Any]) -> bool:
        """Tells whether no number is an infinity or NaN."""
        return bool(np.isfinite(self.to_float32(words)).all())

    def strip_scale_bytes(self, tiles: int) -> int:
        """Returns the bytes of the scales and zero points that a row tile has for so many tiles
        that lie in a block of columns.
        """
        return self.scale_bytes

    def words_of(self, num_values: int) -> int:
        """Returns the number of words for so many values of a row, which must be whole blocks."""
        return num_values // self.block * self.words

    def bytes_of(self, num_values: int) -> int:
        """Returns the bytes of so many values, which must be whole blocks."""
        return self.words_of(num_values) * int(np.dtype(self.word).itemsize)


class Plain(Format):
    """A format that is a dtype of arrays: each value is a word.

    Attributes:
        dtype: The dtype.
        most: The largest number.
    """

    def __init__(
        self, name: str, in_files: str, dtype: Any, most: float, *, is_multiplied: bool
    ) -> None:
        self.name, self.in_files, self.dtype, self.most = name, in_files, np.dtype(dtype), most
        self.word = np.dtype(f"u{self.dtype.itemsize}")
        self.tile_bytes = tile_bytes(8 * self.dtype.itemsize) if is_multiplied else 0
        # The bits of a number's magnitude, and the smallest magnitude that is not finite.
        self._magnitude = self.word.type((1 << (8 * self.dtype.itemsize - 1)) - 1)
        self._not_finite = np.array(np.inf).astype(self.dtype).view(self.word)

    def to_float32(self, words: NDArray[Any]) -> NDArray[np.float32]:
        """See Format."""
        return self.values(words).astype(np.float32)

    def values(self, words: NDArray[Any]) -> NDArray[Any]:
        """Returns the words as an array of the dtype, which shares their memory."""
        return words.view(self.dtype)

    def from_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Format. A number that the format cannot hold becomes an infinity."""
        with np.errstate(all="ignore"):
            rounded = np.ascontiguousarray(values.astype(self.dtype, copy=False))
        return rounded.view(self.word)

    def is_finite(self, words: NDArray[Any]) -> bool:
        """See Format."""
        flat = words.reshape(-1)
        magnitudes = np.empty(_CHUNK, self.word)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            found = np.bitwise_and(chunk, self._magnitude, out=magnitudes[: chunk.size])
            if found.max() >= self._not_finite:
                return False
        return True


@dataclass(frozen=True)
class Stored:
    """A tensor, or some rows of one, as it is stored in a format.

    Attributes:
        format: Its format.
        words: [..., words of a row], of the dtype Format.word.
    """

    format: Format
    words: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the numbers."""
        *rows, num_words = self.words.shape
        return (*rows, num_words // self.format.words * self.format.block)

    def to_float32(self) -> NDArray[np.float32]:
        """See Format."""
        return self.format.to_float32(self.words)

    def values(self) -> NDArray[Any]:
        """See Format."""
        return self.format.values(self.words)

    def turned_into(self, other: Format) -> "Stored":
        """Rounds the numbers to the nearest that another format has."""
        if other is self.format:
            return self
        form = self.format.form_of(other)
        if form is not None:
            return self.format.expanded(self, form).turned_into(other)
        return other.from_stored(self)
