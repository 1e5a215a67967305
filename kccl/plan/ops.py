"""The operators of reductions."""

import operator
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from ..base import arguments
from ..base.dtypes import ALL, Dtype, Kind, bfloat16, float16, float32
from ..base.errors import InvalidArgument

NORMALISED = (float32, float16, bfloat16)
"""The element types that rms_norm() takes."""

NamedOp = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]
OPS: tuple[NamedOp, ...] = get_args(NamedOp)


@dataclass(frozen=True, eq=False)
class PremulSum:
    """The sum of all ranks' products with a number; premul_sum() makes it.

    Attributes:
        factor: This rank's number.
    """

    factor: int | float

    def __str__(self) -> str:
        # The ranks compare this text. It leaves out the factor, which may differ between ranks.
        return "premul_sum"

    def __repr__(self) -> str:
        return f"kccl.premul_sum({self.factor!r})"

    def bits(self, dtype: Dtype) -> int:
        """Returns KcclCall.factor for an element type."""
        if dtype.kind in ("float", "complex"):
            return int.from_bytes(struct.pack("<d", self.factor), "little")
        return int(self.factor) % (1 << 64)


Op = NamedOp | PremulSum


def premul_sum(factor: float) -> PremulSum:
    """Returns the `op` that multiplies this rank's elements by a number and then adds all ranks'.

    The ranks' numbers may differ. For floats of 8, 16 and 32 bits and for complex64 the number and
    the products are rounded to float32, for float64 and complex128 to float64. The sum adds the
    products in rank order in that type, and is rounded to the array's type once. Integers need a
    number without a fraction; products and sums wrap. bool is refused.

    A call first makes a pass over the array that stores the products. Floats of 8 and 16 bits
    travel as float32, and another pass rounds the result. The memory of products and sums stays
    until the communicator itself is freed, also after close().

    Args:
        factor: A float, or an integer from -2**63 to 2**64 - 1; of Python or NumPy.

    Raises:
        InvalidArgument: `factor` is no such number.
    """
    try:
        # Finds NumPy's bool by its name, because this file is also imported while KCCL is built,
        # when there is no NumPy.
        is_bool = isinstance(factor, bool) or "bool" in str(getattr(factor, "dtype", ""))
        if is_bool or isinstance(factor, (str, bytes)):
            raise TypeError
        try:
            number: int | float = operator.index(factor)  # type: ignore[arg-type]
        except TypeError:
            number = float(factor)
            return _premul_sum(number, number.hex())
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"factor is {factor!r}, must be an integer or a float") from None
    return _premul_sum(arguments.between("factor", number, -(1 << 63), (1 << 64) - 1), "")


@lru_cache(maxsize=1024)
def _premul_sum(factor: int | float, _: str) -> PremulSum:
    # The cache gives equal numbers one object, because C knows a call's op by its identity. The
    # second argument, a text, distinguishes numbers that compare equal, such as 0.0 and -0.0.
    return PremulSum(factor)


_BITS: tuple[NamedOp, ...] = ("sum", "prod", "min", "max", "band", "bor", "bxor")
_OF_KIND: dict[Kind, tuple[NamedOp, ...]] = {
    "float": ("sum", "prod", "min", "max", "avg"),
    "signed": _BITS,
    "unsigned": _BITS,
    "bool": _BITS,
    "complex": ("sum", "prod", "avg"),
    "bytes": (),
}
_MEANS = {
    "avg": "a float or a complex type",
    "band": "an integer type or bool",
    "bor": "an integer type or bool",
    "bxor": "an integer type or bool",
}


def ops_of(dtype: Dtype) -> tuple[NamedOp, ...]:
    """Returns the named operators that take an element type, in the order of KcclOp."""
    return _OF_KIND[dtype.kind]


def can_scale(dtype: Dtype) -> bool:
    """Tells whether premul_sum() takes an element type."""
    return dtype.kind in ("float", "complex", "signed", "unsigned")


def can_normalise(dtype: Dtype) -> bool:
    """Tells whether rms_norm() takes an element type."""
    return dtype in NORMALISED


def check_op(op: Any, dtype: Dtype) -> None:
    """Checks the `op` argument of a collective that reduces.

    Raises:
        InvalidArgument: There is no such operator, or it does not take this element type.
    """
    is_known = isinstance(op, PremulSum) or (isinstance(op, str) and op in OPS)
    if not is_known:
        known = ", ".join(OPS)
        raise InvalidArgument(f"op is {op!r}, must be one of {known}, or kccl.premul_sum(factor)")
    allowed = ops_of(dtype)
    if not allowed:
        wanted = f"be one of {', '.join(each.name for each in ALL)}"
        if dtype.is_swapped:
            wanted = "have the machine's byte order"
        raise InvalidArgument(
            f"x: dtype is {dtype.name}, must {wanted}, because this call computes; calls that only "
            "move data take every type"
        )
    if isinstance(op, PremulSum):
        _check_factor(op, dtype)
    elif op not in allowed:
        wanted = _MEANS.get(op, "a real type, because complex numbers have no order")
        raise InvalidArgument(f"op is {op!r} and x has dtype {dtype.name}, must be {wanted}")


def _check_factor(op: PremulSum, dtype: Dtype) -> None:
    if not can_scale(dtype):
        raise InvalidArgument(f"op is {op!r} and x has dtype {dtype.name}, must be a number's type")
    is_whole = isinstance(op.factor, int) or op.factor.is_integer()
    if dtype.kind in ("signed", "unsigned") and not is_whole:
        raise InvalidArgument(
            f"op is {op!r} and x has dtype {dtype.name}: the factor must be an integer, or x a "
            "float"
        )
