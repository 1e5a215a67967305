"""Numbers as callers give them: Python's and NumPy's, of any width."""

import math
import operator
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The value; for NumPy's scalars, and arrays and tensors without an axis, Python's of it."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        item = value.item()
        # A long double has no Python number of its precision.
        return float(item) if isinstance(item, np.floating) else item
    # A tensor of another library, as PyTorch's.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def as_float(value: Any) -> float:
    """A number as a float; NaN, which fits no range, for what is no number: a bool, a string."""
    value = plain(value)
    # Arrays with an axis are no numbers, though those of one value have a float.
    if isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "ndim"):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def as_integer(value: Any) -> int | None:
    """An integer, or what Python takes as an index; None for a bool, and for anything else."""
    value = plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
