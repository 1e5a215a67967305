"""Integers of 4 bits with scales of two levels: those of Q4_K, Q4_1 and Q4_0."""

from .nested import Nested
from .q4_1 import Q4_1
from .q4_k import Q4_K

NESTED4 = (Nested(256, 4, Q4_K), Nested(64, 4, Q4_K), Nested(32, 4, Q4_1))
"""The format with blocks of 256, of 64 and of 32 columns."""
