"""The arguments of calls that normalise rows: rms_norm, alone or behind a sum over the ranks."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import arrays, dtypes
from ..base.arrays import ArrayView
from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument
from ..plan.ops import NORMALISED
from .written import Written

View = Callable[..., ArrayView]
"""A function as Backend.view(): view(array, name, writable=...) returns an array's view."""

MOST_WIDTH = 1 << 31
"""The most elements of a row."""


@dataclass(slots=True)
class NormCase:
    """One call whose arguments have been checked.

    Attributes:
        x, out, weight: Views of the arrays. In place x and out are the same.
        residual: View of the residual; None if there is none.
        scale: View of the scale of a float8 result; None if the result has the type of x.
        result: The object that the call returns.
        given: The name of each argument, the caller's array and its view; x is the first.
        width: Elements of a row.
        eps: The bits of the caller's eps, as a float32.
    """

    x: ArrayView
    out: ArrayView
    weight: ArrayView
    residual: ArrayView | None
    scale: ArrayView | None
    result: Any
    given: list[tuple[str, Any, ArrayView]]
    width: int
    eps: int

    def fields(self) -> dict[str, Any]:
        """Returns fields of KcclCall that say how a row is normalised."""
        return {"count": self.out.count, "width": self.width, "eps": self.eps}

    def addresses(self) -> dict[str, Any]:
        """Returns the fields of KcclCall that are addresses, except input and output."""
        return {
            "weight": self.weight.address,
            "residual": 0 if self.residual is None else self.residual.address,
            "fp8_scale": 0 if self.scale is None else self.scale.address,
        }

    def inputs(self) -> list[ArrayView]:
        """Returns the arrays beside x that the call only reads."""
        return [self.weight] if self.scale is None else [self.weight, self.scale]

    def written(self) -> Written:
        """Returns the arrays that no other rank may give to the same call: each rank adds to its
        residual, and normalises what it has stored in its result.
        """
        found = [("x" if self.out is self.x else "out", self.out)]
        if self.residual is not None:
            found.append(("residual", self.residual))
        return Written(tuple(found))

    def words(self) -> str:
        """Returns what the ranks of one call must agree on, in words."""
        shape = f"{self.x.count // self.width} rows of {self.width} {self.x.dtype.name}"
        residual = "without" if self.residual is None else "with"
        return f"{shape}, {residual} a residual, eps {self.eps:#x}, to {self.out.dtype.name}"


def check(
    view: View,
    x: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    out: Any,
    scale: Any,
    *,
    parts: int = 1,
    may_be_in_place: bool = True,
) -> NormCase:
    """Checks the arguments of a call.

    Args:
        view: Returns an array's view; see View.
        x, residual, weight, eps, out, scale: As in all_reduce_rms_norm().
        parts: Number of equal parts of x's rows. The result has the rows of one part.
        may_be_in_place: Whether `out` may be x.

    Raises:
        InvalidArgument: An argument is wrong.
    """
    seen = view(x, "x", writable=out is None)
    normalised("x: dtype", seen.dtype)
    weights = view(weight, "weight", writable=False)
    _check_type("weight", weights, seen.dtype)
    width = _width(x, seen, weights)
    rows, count = seen.count // width, seen.count // parts
    if rows % parts:
        raise InvalidArgument(f"x has {rows} rows of {width}, must have a multiple of {parts}")
    given = [("x", x, seen), ("weight", weight, weights)]
    rest = None
    if residual is not None:
        rest = view(residual, "residual", writable=True)
        _check_type("residual", rest, seen.dtype)
        _check_count("residual", rest, seen, count)
        given.append(("residual", residual, rest))
    by = None
    if scale is not None:
        by = view(scale, "scale", writable=False)
        if by.dtype != dtypes.float32 or by.count != 1:
            raise InvalidArgument(
                f"scale has {by.count} elements of {by.dtype.name}, must have one of float32"
            )
        if out is None:
            raise InvalidArgument(
                "out is None and a scale is given: out must be an array of float8_e4m3fn"
            )
        given.append(("scale", scale, by))
    result, to = x, seen
    if out is not None:
        result, to = out, view(out, "out", writable=True)
        _check_out(seen, to, has_scale=by is not None)
        _check_count("out", to, seen, count)
        given.append(("out", out, to))
    _check_apart(given, seen, to, rest, may_be_in_place)
    return NormCase(seen, to, weights, rest, by, result, given, width, _eps(eps))


def normalised(what: str, dtype: Dtype | None) -> Dtype:
    """Returns `dtype` if rows of it can be normalised. `what` is its name in the error.

    Raises:
        InvalidArgument: They cannot, or it is None.
    """
    if dtype is None or dtype not in NORMALISED:
        known = ", ".join(each.name for each in NORMALISED)
        raise InvalidArgument(f"{what} is {dtype and dtype.name}, must be one of {known}")
    return dtype


def _check_type(name: str, found: ArrayView, dtype: dtypes.Dtype) -> None:
    if found.dtype != dtype:
        raise InvalidArgument(
            f"{name} has dtype {found.dtype.name}, x has {dtype.name}: must be equal"
        )


def _check_count(name: str, found: ArrayView, x: ArrayView, count: int) -> None:
    if found.count != count:
        wanted = "must be equal" if count == x.count else f"{name} must have {count}"
        raise InvalidArgument(f"{name} has {found.count} elements, x has {x.count}: {wanted}")


def _width(x: Any, seen: ArrayView, weights: ArrayView) -> int:
    shape = arrays.shape(x, seen)
    last = shape[-1] if shape else 0
    if weights.count != last or last == 0:
        raise InvalidArgument(
            f"weight has {weights.count} elements and x has shape {shape}: weight must have as "
            "many as x's last dimension, at least one"
        )
    if last > MOST_WIDTH:
        raise InvalidArgument(f"a row of x has {last} elements, must have at most {MOST_WIDTH}")
    return int(last)


def _eps(eps: Any) -> int:
    """Returns the bits of eps as a float32."""
    try:
        if isinstance(eps, (bool, str, bytes)):
            raise TypeError
        number = float(eps)
        bits = struct.pack("<f", number)
    except (TypeError, ValueError, OverflowError):
        number, bits = math.nan, b""
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"eps is {eps!r}, must be a number from 0 to the largest float32")
    return int.from_bytes(bits, "little")


def _check_out(x: ArrayView, out: ArrayView, *, has_scale: bool) -> None:
    wanted = dtypes.float8_e4m3fn if has_scale else x.dtype
    if out.dtype != wanted:
        why = "scale is given" if has_scale else f"x has {x.dtype.name}"
        what = "float8_e4m3fn" if has_scale else "equal; float8_e4m3fn needs a scale"
        raise InvalidArgument(f"out has dtype {out.dtype.name} and {why}: must be {what}")


def _check_apart(
    given: Sequence[tuple[str, Any, ArrayView]],
    x: ArrayView,
    out: ArrayView,
    residual: ArrayView | None,
    may_be_in_place: bool,
) -> None:
    """Checks that no array that the call writes overlaps another, except that out may be x if
    `may_be_in_place` is true.
    """
    for i, (name, _, one) in enumerate(given):
        for other, _, two in given[i + 1 :]:
            is_apart = (
                one.address + one.nbytes <= two.address or two.address + two.nbytes <= one.address
            )
            is_written = any(each is out or each is residual for each in (one, two))
            is_in_place = one is x and two is out and one.address == two.address
            is_allowed = may_be_in_place and is_in_place and one.nbytes == two.nbytes
            if not is_apart and is_written and not is_allowed:
                raise InvalidArgument(
                    f"{name} begins at {one.address:#x} and {other} at {two.address:#x}: they "
                    "must not overlap"
                )
