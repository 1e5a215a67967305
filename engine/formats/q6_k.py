"""GGUF's Q6_K: blocks of 256 integers of 6 bits, with scales for each 16."""

from .blocks256 import Signed

Q6_K = Signed("Q6_K")
