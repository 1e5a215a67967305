"""Element types: KCCL's names for them, and the names that other libraries use."""

import struct
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ALL",
    "Dtype",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "int32",
    "int64",
    "of",
    "of_format",
    "to_numpy",
]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Dtype:
    """An element type.

    Attributes:
        name: As in "float32" or "bfloat16"; NumPy and PyTorch use the same names.
        itemsize: Bytes of one element.
        is_float: False for integers.
        cpp_name: The type in device source.
    """

    name: str
    itemsize: int
    is_float: bool
    cpp_name: str

    def __repr__(self) -> str:
        return f"kccl.{self.name}"


float32 = Dtype("float32", 4, True, "float")
float64 = Dtype("float64", 8, True, "double")
float16 = Dtype("float16", 2, True, "kccl::f16")
bfloat16 = Dtype("bfloat16", 2, True, "kccl::bf16")
int32 = Dtype("int32", 4, False, "int32_t")
int64 = Dtype("int64", 8, False, "int64_t")

ALL = (float32, float64, float16, bfloat16, int32, int64)
_BY_NAME = {dtype.name: dtype for dtype in ALL}


def _formats(prefix: str) -> dict[str, Dtype]:
    """The buffer protocol's format strings with this prefix, which sets byte order and sizes."""
    dtypes = {"e": float16, "f": float32, "d": float64}
    by_size = {dtype.itemsize: dtype for dtype in (int32, int64)}
    # "l" is C's long in native sizes, and 4 bytes in standard sizes.
    dtypes |= {letter: by_size[struct.calcsize(prefix + letter)] for letter in "ilq"}
    return {prefix + letter: dtype for letter, dtype in dtypes.items()}


# No prefix and "@" mean native sizes. "=", "<" and ">" mean standard sizes; ctypes uses them.
_BY_FORMAT = {
    name: dtype
    for prefix in ("", "@", "=", "<" if sys.byteorder == "little" else ">")
    for name, dtype in _formats(prefix).items()
}


def of(dtype: Any) -> Dtype:
    """The Dtype for `dtype`, which is a Dtype, its name, or a NumPy dtype or scalar type.

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


def of_format(buffer_format: str) -> Dtype:
    """The Dtype for a format string of the buffer protocol.

    Raises:
        InvalidArgument: No element type has this format.
    """
    dtype = _BY_FORMAT.get(buffer_format)
    if dtype is None:
        raise InvalidArgument(
            f"buffer format is {buffer_format!r}, must be one of {', '.join(_BY_FORMAT)}"
        )
    return dtype


def to_numpy(dtype: Any) -> "np.dtype[Any]":
    """NumPy's dtype of the same name. bfloat16, which NumPy lacks, comes from ml_dtypes."""
    import numpy as np

    name = of(dtype).name
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]  # ml_dtypes is untyped
    return np.dtype(name)
