"""The operators of reductions."""

from typing import Any, Literal, get_args

from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument

Op = Literal["sum", "prod", "min", "max", "avg"]
OPS: tuple[Op, ...] = get_args(Op)


def check_op(op: Any, dtype: Dtype) -> None:
    """Checks the `op` argument of a collective that reduces.

    Raises:
        InvalidArgument: There is no such operator, or it does not take this element type.
    """
    if not isinstance(op, str) or op not in OPS:
        raise InvalidArgument(f"op is {op!r}, must be one of {', '.join(OPS)}")
    if op == "avg" and not dtype.is_float:
        raise InvalidArgument(f"op is 'avg' and x has dtype {dtype.name}, must be a float")
