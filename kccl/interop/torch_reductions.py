"""Translates PyTorch's ReduceOp to KCCL's operator, for a process group's reductions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..base import errors
from ..plan.ops import Op, premul_sum
from .torch_errors import InvalidArgument
from .torch_tensors import memory
from .torch_versions import premul_factor

_OPS: tuple[tuple[Any, Op], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


class Reduction(NamedTuple):
    """A ReduceOp of PyTorch, as KCCL makes it.

    Attributes:
        op: KCCL's operator for it.
    """

    op: Op

    def make(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        names: tuple[str, str],
        call: Callable[[Any, Any], Any],
    ) -> None:
        """Makes a call that reduces.

        Args:
            x: This rank's input, which must be dense.
            out: The tensor for this rank's result, which may be x; None if it gets no result.
            names: Names of x and out in error messages.
            call: Gets the array of x, and the array of out. The latter is None if out is x or None.
        """
        own = out.detach() if out is not None and out is not x else None
        call(memory(x, names[0]), None if own is None else memory(own, names[1]))


_REDUCTIONS = [(known, Reduction(name)) for known, name in _OPS]


def reduction_of(opts: Any) -> Reduction:
    """Returns the reduction for the ReduceOp in PyTorch's options; SUM if `opts` is None.

    Raises:
        NotImplementedError: KCCL does not have this operator.
        InvalidArgument: The factor of PREMUL_SUM is no integer and no float.
    """
    given = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, reduction in _REDUCTIONS:
        if given == known:
            return reduction
    if given == dist.ReduceOp.PREMUL_SUM:
        factor = premul_factor(given)
        number = factor.item() if isinstance(factor, torch.Tensor) else factor
        try:
            return Reduction(premul_sum(number))
        except errors.InvalidArgument as error:
            raise InvalidArgument(f"PREMUL_SUM: {error}") from None
    names = ", ".join(known.name for known, _ in _OPS)
    raise NotImplementedError(f"kccl: op is {given}, must be one of {names}, PREMUL_SUM")
