"""What the collectives of a process group share: how PyTorch gives arguments."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import InvalidArgument
from ..plan.specs import Op
from .torch_tensors import array

_OPS: tuple[tuple[Any, Op], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.AVG, "avg"),
)


def only(tensors: list[Any]) -> Any:
    """The one tensor of a list. Raises NotImplementedError if there are more."""
    if len(tensors) != 1:
        raise NotImplementedError(
            f"kccl: {len(tensors)} tensors in one call, must be 1: a process uses one device"
        )
    return tensors[0]


def moved(x: torch.Tensor, name: str) -> Any:
    """array() of a tensor that is copied bit by bit."""
    # PyTorch pickles objects into tensors of uint8.
    if x.dtype is torch.uint8:
        raise NotImplementedError(
            f"kccl: {name} has dtype torch.uint8, and this version moves no bytes, so it has no "
            "collectives of objects either (all_gather_object, broadcast_object_list): make them "
            'on a group of another backend, as new_group(backend="gloo")'
        )
    return array(x, name)


def op_of(given: Any) -> Op:
    """KCCL's name for a ReduceOp."""
    for known, name in _OPS:
        if given == known:
            return name
    names = ", ".join(known.name for known, _ in _OPS)
    raise NotImplementedError(f"kccl: op is {given.op}, must be one of {names}")


def check_equal(parts: Iterable[torch.Tensor], like: torch.Tensor, name: str) -> None:
    """Raises InvalidArgument unless all parts have the size and type of `like`."""
    for rank, part in enumerate(parts):
        if part.shape != like.shape or part.dtype != like.dtype or part.device != like.device:
            raise InvalidArgument(
                f"{name}[{rank}] is {part.dtype} {tuple(part.shape)} on {part.device}, must be "
                f"{like.dtype} {tuple(like.shape)} on {like.device}: all parts must be alike"
            )
