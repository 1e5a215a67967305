"""GGUF's Q4_0: blocks of 32 integers of 4 bits with a scale."""

from .blocks32 import Blocks32

Q4_0 = Blocks32("Q4_0", has_minimums=False, tile_bits=4)
