"""What collectives that reduce have in common."""

from typing import Any, Literal

from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument
from ..plan.specs import OPS

Op = Literal["sum", "prod", "min", "max", "avg"]


def check_op(op: Any, dtype: Dtype) -> None:
    """Checks an `op` argument.

    Raises:
        InvalidArgument: There is no such operator, or not for this element type.
    """
    if not isinstance(op, str) or op not in OPS:
        raise InvalidArgument(f"op is {op!r}, must be one of {', '.join(OPS)}")
    if op == "avg" and not dtype.is_float:
        raise InvalidArgument(f"op is 'avg' and x has dtype {dtype.name}, must be a float")
