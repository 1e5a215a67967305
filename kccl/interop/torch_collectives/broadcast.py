"""broadcast for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ..torch_calls import only, root_of
from ..torch_moves import move_in_place
from ..torch_queue import AnyWork
from ..torch_registry import DEFAULT, find
from ..torch_streams import Ordered

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def broadcast(x: torch.Tensor, root: int = 0, comm: str | None = None) -> torch.Tensor:
    """Returns the root's x, bit by bit, in a new tensor on every rank.

    Args:
        x: Tensor of any dtype, with the same shape and dtype on every rank.
        root: The rank whose tensor is copied.
        comm: As in all_reduce.

    Returns:
        A C-contiguous tensor of the shape of x.

    Raises:
        As all_reduce.
    """
    result: torch.Tensor = _op(x, root, comm or DEFAULT)
    return result


def broadcast_(x: torch.Tensor, root: int = 0, comm: str | None = None) -> torch.Tensor:
    """Makes broadcast() in place, and returns x, which must be dense, as one that is C-contiguous
    or in torch.channels_last, with the same strides on every rank.
    """
    _op_in_place(x, root, comm or DEFAULT)
    return x


@torch.library.custom_op("kccl::broadcast", mutates_args=())
def _op(x: torch.Tensor, root: int, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.broadcast."""
    ranks = find(comm)
    with Ordered(ranks, x.device):
        out = x.clone(memory_format=torch.contiguous_format)
        move_in_place(ranks, out, root, "x")
        return out


@torch.library.custom_op("kccl::broadcast_", mutates_args=("x",))
def _op_in_place(x: torch.Tensor, root: int, comm: str) -> None:
    """See kccl.interop.torch.broadcast_."""
    ranks = find(comm)
    with Ordered(ranks, x.device):
        move_in_place(ranks, x, root, "x")


@_op.register_fake
def _fake(x: torch.Tensor, root: int, comm: str) -> torch.Tensor:
    find(comm)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _of_group(group: "ProcessGroup", tensors: list[torch.Tensor], opts: Any = None) -> AnyWork:
    """Runs dist.broadcast, for any dtype."""
    x, root = only(tensors), root_of(opts)
    return group.run([x], tensors, opts, lambda comm: move_in_place(comm, x, root, "tensor"))


GROUP_METHODS = {
    "broadcast": _of_group,
}
