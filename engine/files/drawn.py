"""Random matrices in MXFP4 whose words follow from a counter, so that a device can make them too.

Block number i of a matrix (formats/mxfp4.py) has five random words of 32 bits, those of the
counters from 5 * i on. The first four are its numbers. The fifth chooses one of three scales. The
twin on devices is kernels/draw.cuh.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.parts import in_parts

SCALES = 3
"""How many scales there are: neighbouring powers of two."""
WORDS = 5
"""The random words of a block."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""The factors of mixed()."""
_BYTES, _BLOCK, _BIAS = 17, 32, 127
# The root mean square of a number, if all 16 are equally likely, with the middle scale 1: that of
# e2m1's numbers, times that of the three scales.
_RMS = math.sqrt(68.5 / 8) * math.sqrt((0.25 + 1 + 4) / 3)
_AT_ONCE = 1 << 16


class Drawn(NamedTuple):
    """A random matrix.

    Attributes:
        key: Tells the matrix from others.
        scale: The byte of its smallest scale.
    """

    key: int
    scale: int


def drawn(key: int, spread: float) -> Drawn:
    """Returns the matrix of a key whose numbers have about this root mean square."""
    return Drawn(key, _BIAS + round(math.log2(spread / _RMS)) - 1)


def blocks_of(matrix: Drawn, first: int, num: int) -> NDArray[np.uint8]:
    """Returns some blocks of a matrix: uint8 [num, 17]."""
    out = np.empty((num, _BYTES), np.uint8)

    def draw(start: int) -> None:
        some = out[start : start + _AT_ONCE]
        counters = np.arange(WORDS * (first + start), WORDS * (first + start + len(some)))
        words = mixed(mixed(counters.astype(np.uint32)) + np.uint32(matrix.key))
        words = words.reshape(-1, WORDS)
        some[:, 0] = matrix.scale + words[:, 4] % SCALES
        some[:, 1:] = words[:, :4].astype("<u4", order="C").view(np.uint8)

    in_parts(draw, num, _AT_ONCE)
    return out


def mixed(words: NDArray[Any]) -> NDArray[np.uint32]:
    """Returns random words, uint32, that follow from these: equal ones from equal ones."""
    words = words ^ words >> np.uint32(16)
    words = words * np.uint32(FIRST)
    words = words ^ words >> np.uint32(15)
    words = words * np.uint32(SECOND)
    found: NDArray[np.uint32] = words ^ words >> np.uint32(16)
    return found
