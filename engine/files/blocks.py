"""Matrices in blocks of GGUF that a device converts to formats/nested.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ..formats.blocks32 import Blocks32
from ..formats.blocks256 import Blocks256


class Blocks(NamedTuple):
    """A matrix as a file stores it.

    Attributes:
        read: Reads rows from start to stop - 1: uint8 [rows, words of a row].
        format: Its format.
    """

    read: Callable[[int, int], NDArray[Any]]
    format: Blocks32 | Blocks256
