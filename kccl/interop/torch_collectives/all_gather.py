"""all_gather for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ...comm import Communicator
from ..torch_calls import check_equal, moved, only
from ..torch_registry import DEFAULT, find
from ..torch_tensors import array, order
from ..torch_work import Work

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def all_gather(x: torch.Tensor, comm: str | None = None) -> torch.Tensor:
    """All ranks' x, in rank order.

    Args:
        x: The same shape and dtype on every rank. If it is not C-contiguous, it is copied first.
        comm: As in all_reduce.

    Returns:
        A tensor [world_size, *x.shape].

    Raises:
        As all_reduce.
    """
    result: torch.Tensor = _op(x, comm or DEFAULT)
    return result


@torch.library.custom_op("kccl::all_gather", mutates_args=())
def _op(x: torch.Tensor, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.all_gather."""
    ranks = find(comm)
    order(ranks, x.device)
    out = x.new_empty((ranks.world_size, *x.shape))
    ranks.all_gather(array(x.contiguous(), "x"), out=array(out, "out"))
    return out


@_op.register_fake
def _fake(x: torch.Tensor, comm: str) -> torch.Tensor:
    return x.new_empty((find(comm).world_size, *x.shape))


def _of_lists(
    group: "ProcessGroup", outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any
) -> Work:
    """dist.all_gather of tensors of equal size. Gathers into one buffer, and copies out."""
    x, parts = only(tensors), only(outs)
    check_equal(parts, x, "tensor_list")
    whole = x.new_empty((len(parts), *x.shape))

    def call(comm: Communicator) -> None:
        comm.all_gather(moved(x, "tensor"), out=array(whole, "out"))
        for part, its in zip(parts, whole, strict=True):
            part.copy_(its)

    return group.run(x, parts, opts, call)


def _of_tensors(group: "ProcessGroup", out: torch.Tensor, x: torch.Tensor, opts: Any) -> Work:
    """dist.all_gather_into_tensor."""
    return group.run(
        x,
        [out],
        opts,
        lambda comm: comm.all_gather(moved(x, "input_tensor"), out=array(out, "output_tensor")),
    )


GROUP_METHODS = {
    "allgather": _of_lists,
    "_allgather_base": _of_tensors,
    "all_gather_single": _of_tensors,  # PyTorch's name from version 2.13 on
}
