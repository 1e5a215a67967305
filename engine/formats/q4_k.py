"""GGUF's Q4_K: blocks of 256 integers of 4 bits, with scales and minimums for each 32."""

from .blocks256 import WithMinimums

Q4_K = WithMinimums("Q4_K", 4)
