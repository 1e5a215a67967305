"""The common part of reductions over groups: partial sums, and how they are rounded."""

from typing import Any, TypedDict

from ...base import dtypes
from ..spec import Request
from ..steps import Part, Steps


class Kind(TypedDict):
    """Element type and operator of a step."""

    dtype: str
    op: str


def accumulator(dtype: str, op: str) -> str:
    """Returns the type in which partial results travel."""
    return dtype if op in ("min", "max") else dtypes.of(dtype).accumulator.name


def kind_of(dtype: str, op: str) -> Kind:
    """Returns the type and the operator of a reduction's steps. An average is a sum until its
    end.
    """
    return {"dtype": accumulator(dtype, op), "op": "sum" if op == "avg" else op}


def widened(s: Steps, part: Part, count: int, dtype: str, wide: str) -> Part:
    """Returns `count` elements in the type of partial results. Adds a step to convert them, if
    needed.
    """
    if wide == dtype:
        return part
    made = s.temporary(count * dtypes.of(wide).itemsize)
    s.convert(part, made, count, dtype, wide)
    return made


def finish(
    s: Steps,
    source: Part,
    target: Part,
    count: int,
    wide: str,
    dtype: str,
    op: str,
    ranks: int = 0,
) -> None:
    """Adds a step that rounds a result to the caller's type, and divides it for an average.

    `ranks` is the number of ranks whose elements are reduced; 0 for all.
    """
    divisor = (ranks or s.grouping.world_size) if op == "avg" else 1
    if wide != dtype or divisor != 1:
        s.convert(source, target, count, wide, dtype, divisor)
    else:
        s.copy(source, target, count * dtypes.of(dtype).itemsize)


def example(request: Request, nbytes: int) -> dict[str, Any]:
    """Returns KcclCall's fields for a sum of `nbytes` bytes on this rank. A type that is not known
    is float32.
    """
    dtype = request.dtype or dtypes.float32
    return {"count": nbytes // dtype.itemsize, "dtype": dtype.name, "op": "sum"}
