"""all_reduce for PyTorch."""

from typing import TYPE_CHECKING, Any, cast

import torch

from ...comm import Communicator
from ...plan.ops import Op
from ..torch_calls import check_one_device, only
from ..torch_queue import AnyWork
from ..torch_reductions import reduction_of
from ..torch_registry import DEFAULT, find
from ..torch_streams import Ordered
from ..torch_tensors import array, memory

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def all_reduce(x: torch.Tensor, op: str = "sum", comm: str | None = None) -> torch.Tensor:
    """Returns the element-wise reduction of all ranks' x, in a new tensor.

    Args:
        x: The same shape and dtype on every rank. If it is not C-contiguous, it is copied first.
        op: As in comm.all_reduce.
        comm: Name of a registered communicator; "default" when None.

    Returns:
        A C-contiguous tensor of the shape of x. It has the same bits on every rank.

    Raises:
        Error: No communicator has this name.
        InvalidArgument: An argument is wrong; nothing was sent.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    result: torch.Tensor = _op(x, op, comm or DEFAULT)
    return result


def all_reduce_(x: torch.Tensor, op: str = "sum", comm: str | None = None) -> torch.Tensor:
    """Makes all_reduce() in place, and returns x, which must be dense, as one that is C-contiguous
    or in torch.channels_last, with the same strides on every rank.
    """
    _op_in_place(x, op, comm or DEFAULT)
    return x


@torch.library.custom_op("kccl::all_reduce", mutates_args=())
def _op(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.all_reduce."""
    ranks = find(comm)
    with Ordered(ranks, x.device):
        x = x.contiguous()
        out = torch.empty_like(x)
        ranks.all_reduce(array(x, "x"), out=array(out, "out"), op=cast(Op, op))
        return out


@torch.library.custom_op("kccl::all_reduce_", mutates_args=("x",))
def _op_in_place(x: torch.Tensor, op: str, comm: str) -> None:
    """See kccl.interop.torch.all_reduce_."""
    ranks = find(comm)
    with Ordered(ranks, x.device):
        ranks.all_reduce(memory(x, "x"), op=cast(Op, op))


@_op.register_fake
def _fake(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    find(comm)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _of_group(group: "ProcessGroup", tensors: list[torch.Tensor], opts: Any = None) -> AnyWork:
    """Runs dist.all_reduce, which is in place."""
    x, op = only(tensors), reduction_of(opts).op

    def call(comm: Communicator) -> None:
        comm.all_reduce(memory(x, "tensor"), op=op)

    return group.run(tensors, tensors, opts, call)


def _of_several(group: "ProcessGroup", tensors: list[torch.Tensor], opts: Any = None) -> AnyWork:
    """Runs dist.all_reduce for several tensors, one after another."""
    check_one_device(tensors, "tensors")
    op = reduction_of(opts).op

    def call(comm: Communicator) -> None:
        for x in tensors:
            comm.all_reduce(memory(x, "tensor"), op=op)

    return group.run(tensors, tensors, opts, call)


GROUP_METHODS = {
    "allreduce": _of_group,
    "allreduce_coalesced": _of_several,
}
