"""GGUF's Q8_0: blocks of 32 integers of 8 bits with a scale."""

from .blocks32 import Blocks32

Q8_0 = Blocks32("Q8_0", has_minimums=False, tile_bits=8)
