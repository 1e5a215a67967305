"""GGUF's Q5_0: blocks of 32 integers of 5 bits with a scale."""

from .blocks32 import Blocks32

Q5_0 = Blocks32("Q5_0", has_minimums=False)
