"""Matrices in MXFP4 that a device converts from the layout of Hugging Face's files."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Pairs(NamedTuple):
    """The matrices that a tensor of an expert has, as the file stores them.

    Attributes:
        read: Reads rows from start to stop - 1 of the tensor: uint8 [rows, blocks, 16], a byte of
            which has columns 2 i and 2 i + 1, and the scales, uint8 [rows, blocks].
        step: How many matrices the tensor has: their rows alternate.
    """

    read: Callable[[int, int], tuple[NDArray[Any], NDArray[Any]]]
    step: int
