"""Numbers as callers give them: Python's and NumPy's, of any width."""

import math
import operator
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The value, and for NumPy's scalars, and arrays of one without an axis, Python's of it."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        item = value.item()
        # A long double has no Python number of its precision.
        return float(item) if isinstance(item, np.floating) else item
    return value


def as_float(value: Any) -> float:
    """A number as a float; NaN, which fits no range, for what is no number: a bool, a string."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
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
