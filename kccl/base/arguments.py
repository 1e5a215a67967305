"""Checks of single arguments.

Each function raises InvalidArgument, before anything is sent. The error names the argument and its
value.
"""

import operator
from typing import Any

from .errors import InvalidArgument

# About 31 years. In nanoseconds, a clock plus this limit still fits 64 bits.
_MAX_SECONDS = 1e9


def integer(name: str, value: Any) -> int:
    """`value` as a Python integer. Takes what Python accepts as an index, as NumPy integers."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {value!r}, must be an integer") from None


def between(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer from `low` to `high`, both included."""
    number = integer(name, value)
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}, must be between {low} and {high}")
    return number


def not_negative(name: str, value: Any) -> int:
    """`value` as an integer that is 0 or more."""
    number = integer(name, value)
    if number < 0:
        raise InvalidArgument(f"{name} is {number}, must not be negative")
    return number


def shape(value: Any) -> tuple[int, ...]:
    """`value` as the shape of an array: an integer or several, none negative."""
    try:
        sizes = tuple(value) if hasattr(value, "__iter__") else (value,)
        numbers = tuple(operator.index(size) for size in sizes)
    except TypeError:
        numbers = (-1,)
    if any(number < 0 for number in numbers):
        raise InvalidArgument(
            f"shape is {value!r}, must be an integer or a tuple of integers, none negative"
        )
    return numbers


def nanoseconds(name: str, seconds: Any) -> int:
    """A limit in seconds as whole nanoseconds, at least 1."""
    try:
        is_good = bool(0 < seconds <= _MAX_SECONDS)
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        raise InvalidArgument(
            f"{name} is {seconds!r}, must be positive and at most {_MAX_SECONDS:.0e} seconds"
        )
    return max(round(float(seconds) * 1e9), 1)
