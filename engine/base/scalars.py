"""Converts numbers that callers give: Python's and NumPy's, of any width."""

import math
import operator
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Returns a Python number for NumPy's scalars, and for arrays and tensors without an axis. Any
    other value is returned as it is.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        item = value.item()
        # A long double stays: Python has no number of its precision.
        return float(item) if isinstance(item, np.floating) else item
    # The value may be a tensor of another library, for example PyTorch.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def as_float(value: Any) -> float:
    """Returns a number as a float. For a bool, a string and anything else that is no number it
    returns NaN, which is in no range.
    """
    value = plain(value)
    # An array with an axis is no number, although float() takes one that has a single value.
    if isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "ndim"):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def as_integer(value: Any) -> int | None:
    """Returns an integer, or the integer that an object with __index__ stands for; None for a bool
    and for anything else.
    """
    value = plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
