"""Element types: one name everywhere, and what other libraries call them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Dtype:
    """An element type.

    Attributes:
        name: "float32", "bfloat16", ...: also NumPy's and PyTorch's name.
        itemsize: Bytes of one element.
        is_float: False for integers.
        buffer_formats: Format characters of the buffer protocol that mean it.
    """

    name: str
    itemsize: int
    is_float: bool
    buffer_formats: str = ""

    def __repr__(self) -> str:
        return f"kccl.{self.name}"


float32 = Dtype("float32", 4, True, "f")
float64 = Dtype("float64", 8, True, "d")
float16 = Dtype("float16", 2, True, "e")
bfloat16 = Dtype("bfloat16", 2, True)
int32 = Dtype("int32", 4, False, "i")
int64 = Dtype("int64", 8, False, "ql")

ALL = (float32, float64, float16, bfloat16, int32, int64)
_BY_NAME = {dtype.name: dtype for dtype in ALL}
_BY_FORMAT = {character: dtype for dtype in ALL for character in dtype.buffer_formats}


@lru_cache(maxsize=256)
def of(dtype: Any) -> Dtype:
    """The Dtype that `dtype` means: a Dtype, its name, or a NumPy dtype or scalar type.

    Raises:
        InvalidArgument: KCCL has no such element type, or its byte order is not the machine's.
    """
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
    """The Dtype of a buffer whose elements have this format string.

    Raises:
        InvalidArgument: No element type has it.
    """
    dtype = _BY_FORMAT.get(buffer_format.lstrip("@="))
    if dtype is None:
        raise InvalidArgument(
            f"buffer format is {buffer_format!r}, must be one of {', '.join(_BY_FORMAT)}"
        )
    return dtype


def to_numpy(dtype: Any) -> "np.dtype[Any]":
    """NumPy's dtype of the same name; 16-bit floats that NumPy lacks come from ml_dtypes."""
    import numpy as np

    name = of(dtype).name
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]  # ml_dtypes is untyped
    return np.dtype(name)
