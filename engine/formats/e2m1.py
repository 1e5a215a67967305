"""Floats of 4 bits, e2m1, as MXFP4 and NVFP4 have them: a sign, 2 bits of exponent, and 1 of
mantissa.
"""

import numpy as np
from numpy.typing import NDArray

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS: NDArray[np.float32] = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)
"""Code -> number, for the 16 codes."""
# The numbers halfway between two sizes. Such a number is a tie, and is rounded to the size whose
# mantissa is even. For every second of these ties that is the larger size.
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_PAIRS = 16


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Returns the codes of the nearest numbers. Values beyond the largest number get its code. NaN
    gets the code of a zero.
    """
    sizes = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for place, between in enumerate(_BETWEEN):
        codes += sizes >= between if place % 2 else sizes > between
    codes |= np.signbit(values).astype(np.uint8) << 3
    return codes


def reordered(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Reorders blocks of 32 codes to the order in which the engine stores them: byte i has the code
    of column i in its lower half, and that of column i + 16 in its upper half.

    Args:
        pairs: uint8 [blocks, 16], with any strides. Byte i has the codes of columns 2 i and
            2 i + 1, as in Hugging Face's files.

    Returns:
        uint8 [blocks, 16].
    """
    # Splits each byte into two, so that each column's code is a byte, in the order of columns.
    halves = pairs.astype("<u2")
    halves |= halves << 4
    halves &= 0x0F0F
    eights = halves.view("<u8")
    for i in range(2):
        eights[:, i] |= eights[:, i + 2] << 4
    return halves[:, : _PAIRS // 2].view(np.uint8)
