"""GGUF's Q5_K: blocks of 256 integers of 5 bits, with scales and minimums for each 32."""

from .blocks256 import WithMinimums

Q5_K = WithMinimums("Q5_K", 5)
