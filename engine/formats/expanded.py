"""GGUF's formats that no executor multiplies as they are stored. While they are read they become
one of those that executors have, with 8 bits a weight or fewer. Their numbers are

    weight = factor / 2 ** power * scale * integer

where a block has a factor in FP16, and 32 or 16 columns have an integer scale. So most of them are
held without rounding. Q2_K, IQ2_XS and IQ2_S are not: each 16 columns have a scale of their own,
and a minimum in Q2_K, with which 32 columns have more than 8 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.parts import in_parts
from .base import Format, Stored
from .ggml import Ggml
from .int8 import INT8
from .nested import Nested
from .q4_0 import Q4_0
from .q6_k import Q6_K
from .q8_0 import Q8_0

Bytes = NDArray[np.uint8]

# Integers of 8 bits with an FP32 scale for 32 columns.
INT8_32 = INT8[-1]
_GROUP = INT8_32.block
_ONE = np.array([1], np.float16).view(np.uint8)
# The smallest normal number of FP16 is 2 ** -14.
_NORMAL = -14
# How many values a thread converts at a time, few enough that they stay in a core's cache.
_AT_ONCE = 1 << 17


class _Parts(NamedTuple):
    """What blocks consist of: the factors, float32 [blocks, 1], the scales, int32 [blocks, scales],
    and the integers, int8 [blocks, values].
    """

    factors: NDArray[np.float32]
    scales: NDArray[np.int32]
    integers: NDArray[np.int8]


class Expanded(Ggml):
    """A format that is expanded.

    Attributes:
        forms: The formats that a tensor may become. The first of them that fits is taken.
    """

    def __init__(
        self,
        in_files: str,
        *forms: Format,
        factor_at: int = 0,
        power: int = 0,
        scales: Callable[[Bytes], NDArray[Any]] | None = None,
    ) -> None:
        """Makes a format.

        Args:
            in_files: Its name in files.
            forms: See the attribute. The last one is INT8_32.
            factor_at: The byte offset of a block's factor.
            power: A factor belongs to 2 ** power times the weights.
            scales: Returns the integer scales [blocks, scales] of blocks. None: they are 1.
        """
        super().__init__(in_files)
        self.forms, self._power, self._scales_of = forms, power, scales
        self._factor_at = factor_at

    def form_of(self, given: Format) -> Format | None:
        """Returns the one of `forms` to which `given` belongs: as that format itself, its quarters,
        or a form of formats/nested.py. None: it belongs to none.
        """
        for form in self.forms:
            is_nested = isinstance(given, Nested) and given.holds(form)
            if given is form or given is form.cut or is_nested:
                return form
        return None

    def rounding(self, form: Format) -> str:
        """Returns words that say what is rounded in one of `forms`; "" if nothing is."""
        if form is INT8_32 and not self._is_exact_in_groups():
            return "rounded by at most 1/254 of the largest of 32 weights"
        if form is Q6_K and self._power:
            return f"but an FP16 factor below 2**{_NORMAL} loses up to {self._power} bits"
        return ""

    def _is_exact_in_groups(self) -> bool:
        """Tells whether 8 bits hold the numbers of 32 columns."""
        return True

    def expanded(self, stored: Stored, form: Format) -> Stored:
        """Returns a tensor of this format in one of `forms`."""
        blocks = np.ascontiguousarray(stored.words).reshape(-1, self.words)
        of_block = form.words_of(self.block)
        words = np.empty((len(blocks), of_block), np.uint8)
        at_once = max(1, _AT_ONCE // self.block)

        def expand_from(first: int) -> None:
            some = blocks[first : first + at_once]
            # A damaged factor gives a factor that is not finite. The caller must check for that.
            with np.errstate(all="ignore"):
                found = self._words(some, form)
            words[first : first + at_once] = found.reshape(len(some), of_block)

        in_parts(expand_from, len(blocks), at_once)
        return Stored(form, words.reshape(*stored.words.shape[:-1], -1))

    def _words(self, blocks: Bytes, form: Format) -> Bytes:
        if form is INT8_32:
            return self._in_groups(blocks)
        factors, scales, integers = self._parts(blocks)
        # Exact but for the smallest factors: rounding().
        halves = (factors * np.float32(0.5**self._power)).astype(np.float16).view(np.uint8)
        if form is Q6_K:
            repeated = scales.repeat(16 // scales.shape[1], axis=1).astype(np.int8)
            return Q6_K.joined(halves, repeated, (integers + np.int8(Q6_K.zero)).view(np.uint8))
        groups = integers.reshape(len(blocks), -1, _GROUP)
        if form is Q4_0:
            nibbles = (groups + np.int8(8)).view(np.uint8)
            packed = nibbles[..., :16] | nibbles[..., 16:] << 4
        else:
            assert form is Q8_0
            packed = groups.view(np.uint8)
        copies = np.broadcast_to(halves[:, None], (*groups.shape[:2], 2))
        return np.concatenate([copies, packed], axis=2)

    def _in_groups(self, blocks: Bytes) -> Bytes:
        """Returns the words of INT8_32. Does not round."""
        factors, scales, integers = self._parts(blocks)
        # A product has at most 11 + 6 bits.
        of_groups = factors * np.float32(0.5**self._power) * scales.astype(np.float32)
        of_groups = of_groups.repeat(self.block // _GROUP // scales.shape[1], axis=1)
        return INT8_32.joined(integers.view(np.uint8), of_groups)

    def _parts(self, blocks: Bytes) -> _Parts:
        """Takes blocks apart."""
        factors = self._factors(blocks).astype(np.float32)
        products = self.to_float32(self._of_one(blocks)) * np.float32(2**self._power)
        if self._scales_of is None:
            return _Parts(factors, np.ones((len(blocks), 1), np.int32), products.astype(np.int8))
        scales = self._scales_of(blocks).astype(np.int32)
        by = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
        integers = products.reshape(*scales.shape, -1) / by
        return _Parts(factors, scales, integers.astype(np.int8).reshape(len(blocks), -1))

    def _factors(self, blocks: Bytes) -> NDArray[np.float16]:
        """Returns the factors [blocks, 1]."""
        at = self._factor_at
        return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)

    def _of_one(self, blocks: Bytes) -> Bytes:
        """Returns the blocks with a factor of 1, whose numbers are integers / 2 ** power."""
        changed = blocks.copy()
        changed[:, self._factor_at : self._factor_at + 2] = _ONE
        return changed


class _Rounded(Expanded):
    """A format whose numbers are rounded to INT8_32."""

    def _is_exact_in_groups(self) -> bool:
        return False

    def _in_groups(self, blocks: Bytes) -> Bytes:
        values = self.to_float32(blocks).reshape(-1, _GROUP)
        weights, scales, _ = INT8_32.quantised(values)
        return INT8_32.joined(weights, scales[:, None])


class _Q3K(Expanded):
    """Q3_K. A scale of 6 bits times an integer of 3 bits is from -124 to 128. Its negative has 8
    bits, and so is exact with a scale for 32 columns.
    """

    def _in_groups(self, blocks: Bytes) -> Bytes:
        products = self.to_float32(self._of_one(blocks))
        scales = -self._factors(blocks).astype(np.float32).repeat(self.block // _GROUP, axis=1)
        return INT8_32.joined((-products).astype(np.int8).view(np.uint8), scales)


class _IQ1M(_Rounded):
    """IQ1_M, whose factor lies in the upper 4 bits of four words of scales."""

    def _factors(self, blocks: Bytes) -> NDArray[np.float16]:
        words = _words(blocks, 48, 56, np.uint16) >> 12
        bits = np.zeros((len(blocks), 1), np.uint16)
        for i in range(4):
            bits |= words[:, i : i + 1] << np.uint16(4 * i)
        return bits.view(np.float16)

    def _of_one(self, blocks: Bytes) -> Bytes:
        changed = blocks.copy()
        words = changed[:, 48:].view(np.uint16)
        words &= 0x0FFF
        words |= int(_ONE.view(np.uint16)[0]) >> np.array([0, 4, 8, 12], np.uint16) << 12
        return changed


def _words(
    blocks: Bytes, first: int, end: int, dtype: type[np.unsignedinteger[Any]]
) -> NDArray[Any]:
    """Returns the bytes from `first` to `end` - 1 of blocks as words of a dtype."""
    return np.ascontiguousarray(blocks[:, first:end]).view(dtype)


def _odd(scales: NDArray[Any]) -> NDArray[Any]:
    """Returns the odd number for which an integer stands."""
    return 2 * scales.astype(np.int32) + 1


def _nibbles(of_bytes: Bytes) -> Bytes:
    """Returns both halves of each byte, the lower one first."""
    return np.stack([of_bytes & 15, of_bytes >> 4], axis=2).reshape(len(of_bytes), -1)


def _of_q3_k(blocks: Bytes) -> NDArray[Any]:
    lower, upper = blocks[:, 96:104], blocks[:, 104:108]
    fours = np.concatenate([lower & 15, lower >> 4], axis=1)
    twos = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: NDArray[Any] = (fours | twos << 4).astype(np.int32) - 32
    return scales


def _of_iq4_xs(blocks: Bytes) -> NDArray[Any]:
    upper = _words(blocks, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return (_nibbles(blocks[:, 4:8]) | upper << 4).astype(np.int32) - 32


def _of_iq1_m(blocks: Bytes) -> NDArray[Any]:
    shifts = np.array([0, 3, 6, 9], np.uint16)
    return _odd((_words(blocks, 48, 56, np.uint16)[..., None] >> shifts & 7).reshape(-1, 16))


EXPANDED = (
    _Rounded("Q2_K", INT8_32),
    _Q3K("Q3_K", Q6_K, INT8_32, factor_at=108, scales=_of_q3_k),
    Expanded(
        *("IQ1_S", INT8_32, Q6_K),
        power=3,
        scales=lambda blocks: _odd(_words(blocks, 34, 50, np.uint16) >> 12 & 7),
    ),
    _IQ1M("IQ1_M", Q6_K, INT8_32, power=3, scales=_of_iq1_m),
    Expanded(
        *("IQ2_XXS", INT8_32),
        power=3,
        scales=lambda blocks: _odd(_words(blocks, 2, 66, np.uint32)[:, 1::2] >> 28),
    ),
    _Rounded("IQ2_XS", INT8_32),
    _Rounded("IQ2_S", INT8_32),
    Expanded(
        *("IQ3_XXS", INT8_32, Q6_K),
        power=1,
        scales=lambda blocks: _odd(_words(blocks, 66, 98, np.uint32) >> 28),
    ),
    Expanded(
        *("IQ3_S", Q6_K, INT8_32),
        scales=lambda blocks: _odd(_nibbles(blocks[:, 106:110])),
    ),
    Expanded("IQ4_NL", Q8_0, INT8_32),
    Expanded("IQ4_XS", INT8_32, scales=_of_iq4_xs),
    Expanded("TQ1_0", Q4_0, INT8_32, factor_at=52),
    Expanded("TQ2_0", Q4_0, INT8_32, factor_at=64),
)
"""The formats."""
