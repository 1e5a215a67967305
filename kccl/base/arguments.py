"""Checks of single arguments.

Each function raises InvalidArgument. The error names the argument and its
value.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from .dtypes import Dtype
from .errors import InvalidArgument

# The longest timeout, about 31 years. In nanoseconds, a clock plus this timeout still fits 64 bits.
_MAX_SECONDS = 1e9


def integer(name: str, value: Any) -> int:
    """Returns `value` as a Python integer. Takes what Python accepts as an index, such as NumPy
    integers.

    A bool is refused, because the caller probably meant it for another argument, as in wait(True).
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {value!r}, must be an integer") from None


def between(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an integer from `low` to `high`, both included."""
    number = integer(name, value)
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}, must be between {low} and {high}")
    return number


def not_negative(name: str, value: Any) -> int:
    """Returns `value` as an integer that is 0 or more."""
    number = integer(name, value)
    if number < 0:
        raise InvalidArgument(f"{name} is {number}, must not be negative")
    return number


def whole_elements(name: str, nbytes: int, dtype: Dtype | None) -> None:
    """Checks that `nbytes` bytes are whole elements of `dtype`. Without a type all bytes pass."""
    if dtype is not None and nbytes % dtype.itemsize:
        raise InvalidArgument(
            f"{name} is {nbytes}, must be a multiple of {dtype.itemsize}, the size of a "
            f"{dtype.name}"
        )


def shape(value: Any) -> tuple[int, ...]:
    """Returns `value` as the shape of an array: an integer or several, none negative."""
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
    """Returns a timeout in seconds as whole nanoseconds, at least 1."""
    try:
        is_good = bool(0 < seconds <= _MAX_SECONDS)
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        raise InvalidArgument(
            f"{name} is {seconds!r}, must be positive and at most {_MAX_SECONDS:.0e} seconds"
        )
    return max(round(float(seconds) * 1e9), 1)


def explained(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a wrapper of the method. If it is called with wrong arguments, its TypeError says how
    to call it.

    Args:
        method: A method of a class.
        name: What its callers call it, as in "all_reduce".
    """

    @wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return method(self, *args, **keywords)
        except TypeError:
            found = _wrong_form(method, name, args, keywords)
            if found:
                raise TypeError(found) from None
            raise

    return call


def _wrong_form(
    method: Callable[..., Any], name: str, args: Sequence[Any], keywords: Mapping[str, Any]
) -> str:
    """Returns what is wrong with the number and names of a call's arguments; "" if nothing is."""
    accepted = signature(method)
    try:
        accepted.bind(None, *args, **keywords)
    except TypeError as error:
        reason = str(error)
    else:
        return ""
    parameters = list(accepted.parameters.values())[1:]
    places = [each.name for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    named = [each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    if len(args) <= len(places):
        return f"{name}(): {reason}; its arguments are {', '.join([*places, *named])}"
    count = "1 positional argument" if len(places) == 1 else f"{len(places)} positional arguments"
    beginning = f"{name}() takes {count}, {' and '.join(places)}, and got {len(args)}"
    return f"{beginning}: {', '.join(named)} are keyword arguments"
