"""Converts a number to the bytes of a kernel's parameter.

The size of a parameter is known on every target. Its kind, a letter as in NumPy, is known on the
simulator: "i" and "u" for integers with and without a sign, "b" for bool, "f" for float and double,
"V" for all other types. For a GPU's kernel it is "?".
"""

import math
import struct
from typing import Any

from .errors import InvalidArgument

NUMBERS = ("i", "u", "b", "f")
_INTEGERS = ("i", "u", "b")
_HALVES = {"e": "float16", "E": "bfloat16"}
_WHOLE, _FLOATS = (1, 2, 4, 8), {4: "f", 8: "d"}
_FOR = {
    "i": " for this integer with a sign",
    "u": " for this integer without a sign",
    "b": ", as the parameter is a bool",
    "?": ", with or without a sign",
}


def scalar_bytes(value: Any, name: str, num_bytes: int, kind: str) -> bytes | None:
    """Returns the bytes of a bool, an int or a float for a parameter.

    Args:
        value: A bool, an integer (Python's or NumPy's) or a Python float.
        name: The parameter, for error messages.
        num_bytes: The parameter's size in bytes.
        kind: The parameter's kind, as above.

    Returns:
        The bytes; None if a parameter of this size or kind takes no such number.

    Raises:
        InvalidArgument: The parameter takes such numbers, but not this one.
    """
    if kind == "V":
        return None
    if isinstance(value, float) and kind not in _INTEGERS:
        return _float(value, name, num_bytes)
    if isinstance(value, float) and not value.is_integer():
        low, high = _range(num_bytes, kind)
        raise InvalidArgument(
            f"{name} is {value!r}, must be an integer of {low} to {high}: the kernel's parameter "
            f"is {words(num_bytes, kind)}"
        )
    whole = int(value)
    if kind == "f":
        return _whole_float(whole, name, num_bytes)
    if num_bytes not in _WHOLE:
        return None
    bits = 8 * num_bytes
    low, high = _range(num_bytes, kind)
    if not low <= whole <= high:
        raise InvalidArgument(
            f"{name} is {whole}, must fit {bits} bits: {low} to {high}{_FOR[kind]}"
        )
    data: bytes = (whole % 2**bits).to_bytes(num_bytes, "little")
    return data


def check_elements(array: Any, pointee: tuple[str, int] | None, name: str) -> None:
    """Refuses an array whose element type is not the one that a parameter points to.

    Args:
        array: The array. It passes if its elements are no numbers, or if its elements or those
            that the parameter points to have one byte. Pointers to unsigned integers take floats,
            too.
        pointee: Kind and bytes of the numbers; "e" and "E" are the kinds of float16 and bfloat16.
            None if it points to something else.
        name: The parameter, for error messages.

    Raises:
        InvalidArgument: The elements have another size or type. Integers may differ in the sign.
    """
    dtype = getattr(array, "dtype", None)
    given = getattr(dtype, "name", "")
    is_number = getattr(dtype, "kind", "V") in "iufb" or given == _HALVES["E"]
    if dtype is None or pointee is None or not is_number or 1 in (pointee[1], dtype.itemsize):
        return
    kind, num_bytes = pointee
    if kind in ("f", *_HALVES):
        fits = given == element_name(kind, num_bytes)
    elif dtype.kind in "iub":
        fits = dtype.itemsize == num_bytes
    else:
        fits = kind == "u"
    if not fits:
        raise InvalidArgument(
            f"{name} is an array of {dtype}, must be one of {element_name(kind, num_bytes)}, to "
            "which the parameter points; array.view(dtype) passes its bits as another type"
        )


def element_name(kind: str, num_bytes: int) -> str:
    """Returns the name of a type of elements, as NumPy has it."""
    names = {"f": "float", "i": "int", "u": "uint", "b": "bool"}
    return _HALVES.get(kind) or f"{names[kind]}{8 * num_bytes}"


def words(num_bytes: int, kind: str) -> str:
    """Describes a parameter that takes a number of a known kind."""
    if kind == "b":
        return "a bool"
    return f"{'a float' if kind == 'f' else 'an integer'} of {num_bytes} bytes"


def _range(num_bytes: int, kind: str) -> tuple[int, int]:
    bits = 8 * num_bytes
    low = 0 if kind in ("u", "b") else -(2 ** (bits - 1))
    return low, {"b": 1, "i": 2 ** (bits - 1) - 1}.get(kind, 2**bits - 1)


def _float(value: float, name: str, num_bytes: int) -> bytes | None:
    if num_bytes not in _FLOATS:
        return None
    try:
        return struct.pack(f"<{_FLOATS[num_bytes]}", value)
    except OverflowError:
        raise InvalidArgument(
            f"{name} is {value!r}, must be at most {_largest_float32():.9g} in magnitude to fit "
            "the parameter, a float of 4 bytes"
        ) from None


def _whole_float(value: int, name: str, num_bytes: int) -> bytes | None:
    if num_bytes not in _FLOATS:
        return None
    form = _FLOATS[num_bytes]
    try:
        data = struct.pack(f"<{form}", value)
        is_exact = struct.unpack(f"<{form}", data)[0] == value
    except OverflowError:
        is_exact = False
    if not is_exact:
        raise InvalidArgument(
            f"{name} is {value}, which a float of {num_bytes} bytes does not hold exactly: pass "
            "float(...) to round it"
        )
    return data


def _largest_float32() -> float:
    return math.ldexp(2 - 2**-23, 127)
