"""Reads and checks the arguments that PyTorch passes to the collectives of a process group."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .torch_errors import InvalidArgument


def only(tensors: list[Any]) -> Any:
    """Returns the only tensor of a list. Raises NotImplementedError if it has another length."""
    if len(tensors) != 1:
        raise NotImplementedError(
            f"kccl: {len(tensors)} tensors in one call, must be 1: a process uses one device"
        )
    return tensors[0]


def check_one_device(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Raises InvalidArgument if the list is empty, or its tensors are on several devices."""
    if not tensors:
        raise InvalidArgument(f"{name} has no tensors, must have one or more")
    for number, x in enumerate(tensors):
        if x.device != tensors[0].device:
            raise InvalidArgument(
                f"{name}[{number}] is on {x.device}, and {name}[0] on {tensors[0].device}: all "
                "tensors of one call must be on one device"
            )


def is_async(opts: Any) -> bool:
    """Tells from PyTorch's options whether a call is asynchronous. It is if `opts` is None."""
    return bool(getattr(opts, "asyncOp", True))


def root_of(opts: Any) -> int:
    """Returns the root rank from PyTorch's options, or 0 if `opts` is None, as PyTorch does."""
    root: int = 0 if opts is None else opts.rootRank
    return root


def check_as_many(outs: Sequence[Any], ins: Sequence[Any], names: tuple[str, str]) -> None:
    """Raises InvalidArgument unless both lists have the same length."""
    if len(outs) != len(ins):
        raise InvalidArgument(
            f"{names[0]} has {len(outs)} entries and {names[1]} {len(ins)}, must have as many"
        )


def check_equal(
    parts: Iterable[torch.Tensor], like: torch.Tensor, name: str, start: int = 0
) -> None:
    """Raises InvalidArgument unless all parts have the shape, dtype and device of `like`.

    The first part is that of rank `start`.
    """
    for rank, part in enumerate(parts, start):
        if part.shape != like.shape or part.dtype != like.dtype or part.device != like.device:
            raise InvalidArgument(
                f"{name}[{rank}] is {part.dtype} {tuple(part.shape)} on {part.device}, must be "
                f"{like.dtype} {tuple(like.shape)} on {like.device}: all parts must be alike"
            )


def check_alike(tensors: Sequence[torch.Tensor], name: str, count: int) -> None:
    """Raises InvalidArgument unless there are `count` tensors, of one dtype and on one device."""
    if len(tensors) != count:
        raise InvalidArgument(f"{name} has {len(tensors)} tensors, must have {count}, one a rank")
    for rank, x in enumerate(tensors):
        if x.dtype != tensors[0].dtype:
            raise InvalidArgument(
                f"{name}[{rank}] is {x.dtype}, and {name}[0] {tensors[0].dtype}: all must be alike"
            )
    check_one_device(tensors, name)
