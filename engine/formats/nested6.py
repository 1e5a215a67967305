"""Integers of 6 bits with scales of two levels: those of all formats with 4 to 6 bits of GGUF."""

from .nested import Nested
from .q5_1 import Q5_1
from .q6_k import Q6_K

NESTED6 = (Nested(256, 6, Q6_K), Nested(64, 6, Q6_K), Nested(32, 6, Q5_1))
"""The format with blocks of 256, of 64 and of 32 columns."""
