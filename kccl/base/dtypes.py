"""Element types: KCCL's names for them, and the names that other libraries use."""

import re
import struct
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from .errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ALL",
    "Dtype",
    "bfloat16",
    "bool_",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "of",
    "of_format",
    "to_numpy",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


def __dir__() -> list[str]:
    return __all__


Kind = Literal["float", "signed", "unsigned", "bool", "complex", "bytes"]


@dataclass(frozen=True)
class Dtype:
    """An element type.

    Attributes:
        name: As in "float32" or "bfloat16"; NumPy, ml_dtypes and PyTorch use the same names.
        itemsize: Bytes of one element.
        kind: The kind of elements. "bytes" is a type that KCCL only moves.
        cpp_name: The type in device source; "" for "bytes".
        is_swapped: True if the kind is "bytes" only because the elements have the other byte order
            than the machine.
    """

    name: str
    itemsize: int
    kind: Kind
    cpp_name: str = ""
    is_swapped: bool = False

    def __repr__(self) -> str:
        if self.kind == "bytes":
            return f"kccl.dtypes.Dtype({self.name!r}, {self.itemsize}, 'bytes')"
        return "kccl.bool_" if self.kind == "bool" else f"kccl.{self.name}"

    @property
    def is_float(self) -> bool:
        """Tells whether the elements are real floats."""
        return self.kind == "float"

    @property
    def accumulator(self) -> "Dtype":
        """Returns the type in which sums are accumulated; for integers, which wrap, the type
        itself.
        """
        return float32 if self.is_float and self.itemsize < 4 else self

    @property
    def has_nan(self) -> bool:
        """Tells whether some patterns of bits are NaN."""
        return self.kind in ("float", "complex")

    @property
    def constant(self) -> str:
        """Returns the type's member of KcclDtype in abi.inc."""
        return "kKccl" + "".join(word.capitalize() for word in self.name.split("_"))


float32 = Dtype("float32", 4, "float", "float")
float64 = Dtype("float64", 8, "float", "double")
float16 = Dtype("float16", 2, "float", "kccl::f16")
bfloat16 = Dtype("bfloat16", 2, "float", "kccl::bf16")
float8_e4m3fn = Dtype("float8_e4m3fn", 1, "float", "kccl::f8e4m3")
float8_e5m2 = Dtype("float8_e5m2", 1, "float", "kccl::f8e5m2")
int8 = Dtype("int8", 1, "signed", "int8_t")
int16 = Dtype("int16", 2, "signed", "int16_t")
int32 = Dtype("int32", 4, "signed", "int32_t")
int64 = Dtype("int64", 8, "signed", "int64_t")
uint8 = Dtype("uint8", 1, "unsigned", "uint8_t")
uint16 = Dtype("uint16", 2, "unsigned", "uint16_t")
uint32 = Dtype("uint32", 4, "unsigned", "uint32_t")
uint64 = Dtype("uint64", 8, "unsigned", "uint64_t")
bool_ = Dtype("bool", 1, "bool", "kccl::boolean")
complex64 = Dtype("complex64", 8, "complex", "kccl::complex64")
complex128 = Dtype("complex128", 16, "complex", "kccl::complex128")

COMMON_FLOATS = (float32, float64, float16, bfloat16)
_SIGNED = (int8, int16, int32, int64)
_UNSIGNED = (uint8, uint16, uint32, uint64)
ALL = (
    *COMMON_FLOATS,
    int32,
    int64,
    int8,
    int16,
    *_UNSIGNED,
    bool_,
    float8_e4m3fn,
    float8_e5m2,
    complex64,
    complex128,
)
"""The element types that KCCL can reduce, in the order of KcclDtype."""

_BY_NAME = {dtype.name: dtype for dtype in ALL}
_UNSIGNED_OF_SIZE = {dtype.itemsize: dtype for dtype in _UNSIGNED}
_BOOL_OPS = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}


def same_bits(dtype: Dtype, op: str) -> tuple[Dtype, str]:
    """Returns the element type and operator whose kernels are used for `dtype` and `op`. They give
    the same bits, so several types need only one compiled kernel.
    """
    if dtype.kind == "bool":
        return dtype, _BOOL_OPS.get(op, op)
    if dtype.kind == "signed" and op not in ("min", "max"):
        return _UNSIGNED_OF_SIZE[dtype.itemsize], op
    return dtype, op


def _formats(prefix: str) -> dict[str, Dtype]:
    """Returns the buffer protocol's format strings with this prefix, which sets byte order and
    sizes.
    """
    dtypes = {"e": float16, "f": float32, "d": float64, "?": bool_}
    dtypes |= {"Zf": complex64, "Zd": complex128}
    # "l" is C's long in native sizes, and 4 bytes in standard sizes.
    for kinds in (_SIGNED, _UNSIGNED):
        by_size = {dtype.itemsize: dtype for dtype in kinds}
        letters = "bhilq" if kinds is _SIGNED else "BHILQ"
        dtypes |= {letter: by_size[struct.calcsize(prefix + letter)] for letter in letters}
    return {prefix + letter: dtype for letter, dtype in dtypes.items()}


# No prefix and "@" mean native sizes. "=", "<" and ">" mean standard sizes; ctypes uses them.
_BY_FORMAT = {
    name: dtype
    for prefix in ("", "@", "=", "<" if sys.byteorder == "little" else ">")
    for name, dtype in _formats(prefix).items()
}


def of(dtype: Any) -> Dtype:
    """Returns the Dtype for `dtype`, which is a Dtype, its name, or a NumPy dtype or scalar type.

    Raises:
        InvalidArgument: KCCL does not have this element type, or its byte order is not the
            machine's.
    """
    try:
        return _of(dtype)
    except TypeError:  # not hashable
        raise InvalidArgument(f"dtype is {dtype}, must be one of {', '.join(_BY_NAME)}") from None


@lru_cache(maxsize=256)
def _of(dtype: Any) -> Dtype:
    if isinstance(dtype, Dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if name is None:
        name = getattr(dtype, "__name__", str(dtype))
    if name not in _BY_NAME:
        raise InvalidArgument(f"dtype is {dtype}, must be one of {', '.join(_BY_NAME)}")
    if not getattr(dtype, "isnative", True):
        raise InvalidArgument(f"dtype is {dtype}, must have the machine's byte order")
    return _BY_NAME[name]


def moved(dtype: Any) -> Dtype:
    """Returns the Dtype for the elements of an array, which may be of a type that KCCL only moves.

    Raises:
        InvalidArgument: The elements are Python objects, or their size is not known.
    """
    try:
        return _moved(dtype)
    except TypeError:  # not hashable
        raise InvalidArgument(f"dtype is {dtype}, must be the type of an array") from None


@lru_cache(maxsize=256)
def _moved(dtype: Any) -> Dtype:
    try:
        return _of(dtype)
    except InvalidArgument:
        itemsize = getattr(dtype, "itemsize", None)
        if not isinstance(itemsize, int) or itemsize < 1:
            raise
        if getattr(dtype, "hasobject", False):
            raise _has_objects(f"dtype is {dtype}") from None
        is_swapped = getattr(dtype, "name", None) in _BY_NAME and not dtype.isnative
        return of_bytes(str(dtype), itemsize, is_swapped=is_swapped)


def _has_objects(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what}, must have no Python objects: they mean nothing to other ranks")


def of_bytes(name: str, itemsize: int, *, is_swapped: bool = False) -> Dtype:
    """Returns the Dtype for elements of `itemsize` bytes, of a type that KCCL only moves."""
    return Dtype(name, itemsize, "bytes", is_swapped=is_swapped)


def of_format(buffer_format: str, itemsize: int) -> Dtype:
    """Returns the Dtype for a format string of the buffer protocol and the size of an element.

    Raises:
        InvalidArgument: The elements are Python objects, or have some.
    """
    known = _BY_FORMAT.get(buffer_format)
    if known:
        return known
    # "O" stands for a Python object. Names of fields, which stand between colons and may have an
    # "O" too, are removed first.
    if "O" in re.sub(":[^:]*:", "", buffer_format):
        raise _has_objects(f"buffer format is {buffer_format!r}")
    is_swapped = buffer_format[:1] in "<>!" and f"={buffer_format[1:]}" in _BY_FORMAT
    return of_bytes(f"buffer format {buffer_format!r}", itemsize, is_swapped=is_swapped)


def to_numpy(dtype: Any) -> "np.dtype[Any]":
    """Returns NumPy's dtype of the same name. Floats that NumPy lacks come from ml_dtypes.

    A type that KCCL only moves becomes NumPy's void of its size.
    """
    import numpy as np

    kind = of(dtype)
    if kind.kind == "bytes":
        return np.dtype(f"V{kind.itemsize}")
    name = kind.name
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))  # type: ignore[no-any-return]  # it is untyped
    return np.dtype(name)
