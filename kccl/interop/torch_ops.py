"""PyTorch's custom ops kccl::..., and the names under which they find a communicator.

A custom op takes only tensors, numbers and strings, so torch.compile can trace it. It traces the
function that is marked register_fake, and runs or captures the op itself.
"""

from typing import cast

import torch

from ..base.errors import Error, InvalidArgument
from ..comm import Communicator
from ..plan.specs import Op
from .torch_tensors import array, order

DEFAULT = "default"
_registered: dict[str, Communicator] = {}


def register(comm: Communicator, name: str = DEFAULT) -> None:
    """Gives a communicator a name, for the functions of kccl.interop.torch in this process.

    The communicator stays referenced until unregister().

    Raises:
        InvalidArgument: Another communicator has this name.
    """
    if _registered.get(name, comm) is not comm:
        raise InvalidArgument(
            f"name is {name!r}, and another communicator is registered under it: call "
            f"unregister({name!r}) first"
        )
    _registered[name] = comm


def unregister(name: str = DEFAULT) -> None:
    """Removes a name. The communicator stays open. Idempotent."""
    _registered.pop(name, None)


def find(name: str) -> Communicator:
    """The communicator that is registered under a name.

    Raises:
        Error: There is none.
    """
    if name not in _registered:
        known = ", ".join(map(repr, _registered)) or "none"
        raise Error(
            f"no communicator is registered as {name!r}, registered are: {known}; "
            "call kccl.interop.torch.register(comm) first"
        )
    return _registered[name]


@torch.library.custom_op("kccl::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.all_reduce."""
    ranks = find(comm)
    order(ranks, x.device)
    x = x.contiguous()
    out = torch.empty_like(x)
    ranks.all_reduce(array(x, "x"), out=array(out, "out"), op=cast(Op, op))
    return out


@torch.library.custom_op("kccl::all_reduce_", mutates_args=("x",))
def all_reduce_in_place(x: torch.Tensor, op: str, comm: str) -> None:
    """See kccl.interop.torch.all_reduce_."""
    ranks = find(comm)
    order(ranks, x.device)
    ranks.all_reduce(array(x, "x"), op=cast(Op, op))


@torch.library.custom_op("kccl::broadcast", mutates_args=())
def broadcast(x: torch.Tensor, root: int, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.broadcast."""
    ranks = find(comm)
    order(ranks, x.device)
    out = x.clone(memory_format=torch.contiguous_format)
    ranks.broadcast(array(out, "x"), root)
    return out


@torch.library.custom_op("kccl::broadcast_", mutates_args=("x",))
def broadcast_in_place(x: torch.Tensor, root: int, comm: str) -> None:
    """See kccl.interop.torch.broadcast_."""
    ranks = find(comm)
    order(ranks, x.device)
    ranks.broadcast(array(x, "x"), root)


@torch.library.custom_op("kccl::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.all_gather."""
    ranks = find(comm)
    order(ranks, x.device)
    out = x.new_empty((ranks.world_size, *x.shape))
    ranks.all_gather(array(x.contiguous(), "x"), out=array(out, "out"))
    return out


@torch.library.custom_op("kccl::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.reduce_scatter."""
    ranks = find(comm)
    order(ranks, x.device)
    out = x.new_empty(_part(x, ranks))
    ranks.reduce_scatter(array(x.contiguous(), "x"), out=array(out, "out"), op=cast(Op, op))
    return out


def _part(x: torch.Tensor, ranks: Communicator) -> tuple[int, ...]:
    """The shape of one rank's chunk of x."""
    if x.dim() == 0 or x.shape[0] % ranks.world_size != 0:
        raise InvalidArgument(
            f"x has shape {tuple(x.shape)}, must have a multiple of {ranks.world_size} rows, the "
            "world_size"
        )
    return (x.shape[0] // ranks.world_size, *x.shape[1:])


@all_reduce.register_fake
def _all_reduce_fake(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    find(comm)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@broadcast.register_fake
def _broadcast_fake(x: torch.Tensor, root: int, comm: str) -> torch.Tensor:
    find(comm)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _all_gather_fake(x: torch.Tensor, comm: str) -> torch.Tensor:
    return x.new_empty((find(comm).world_size, *x.shape))


@reduce_scatter.register_fake
def _reduce_scatter_fake(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    return x.new_empty(_part(x, find(comm)))
