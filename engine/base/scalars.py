"""Converts numbers that callers give: Python's and NumPy's, of any width."""

import math
import operator
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Converts NumPy's scalars, and arrays and tensors without an axis, to Python numbers. Returns
    any other value unchanged.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        item = value.item()
        # item() returns a long double unchanged, because Python has no number of its precision.
        return float(item) if isinstance(item, np.floating) else item
    # The value may be a tensor of another library, for example PyTorch.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def as_float(value: Any) -> float:
    """Converts a number to float. Returns NaN for a bool, a string and anything else that is no
    number. NaN is in no range, so the caller's check refuses it.
    """
    value = plain(value)
    # Refuses arrays with axes, although float() converts one that has a single value.
    if isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "ndim"):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def as_integer(value: Any) -> int | None:
    """Converts an integer, or an object with __index__, to int. Returns None for a bool and for
    anything else.
    """
    value = plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
