"""GGUF's Q5_1: blocks of 32 integers of 5 bits with a scale and a minimum."""

from .blocks32 import Blocks32

Q5_1 = Blocks32("Q5_1", has_minimums=True)
