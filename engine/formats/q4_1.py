"""GGUF's Q4_1: blocks of 32 integers of 4 bits with a scale and a minimum."""

from .blocks32 import Blocks32

Q4_1 = Blocks32("Q4_1", has_minimums=True)
