"""all_gather for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ...comm import Communicator
from ..torch_calls import check_alike, check_as_many, check_equal, check_one_device, only
from ..torch_moves import copy_out, gather_into, lengths, movable
from ..torch_queue import AnyWork
from ..torch_registry import DEFAULT, find
from ..torch_streams import Ordered

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def all_gather(x: torch.Tensor, comm: str | None = None) -> torch.Tensor:
    """Returns all ranks' x, in rank order.

    Args:
        x: Tensor of any dtype, with the same shape and dtype on every rank. If it is not
            C-contiguous, it is copied first.
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
    with Ordered(ranks, x.device):
        out = x.new_empty((ranks.world_size, *x.shape))
        gather_into(ranks, x.contiguous(), out, ("x", "out"))
        return out


@_op.register_fake
def _fake(x: torch.Tensor, comm: str) -> torch.Tensor:
    return x.new_empty((find(comm).world_size, *x.shape))


def _gather_parts(comm: Communicator, parts: list[torch.Tensor], x: torch.Tensor) -> None:
    """Gathers all ranks' x into one temporary tensor, and copies it to the parts."""
    whole = x.new_empty(len(parts) * x.numel())
    gather_into(comm, x.contiguous(), whole, ("tensor", "tensor_list"))
    copy_out(whole, parts)


def _of_lists(
    group: "ProcessGroup",
    outs: list[list[torch.Tensor]],
    tensors: list[torch.Tensor],
    opts: Any = None,
) -> AnyWork:
    """Runs dist.all_gather, for any dtype. The ranks' tensors may differ in length."""
    x, parts = only(tensors), only(outs)
    check_alike(parts, "tensor_list", group.size())
    check_equal([parts[group.rank()]], x, "tensor_list", group.rank())
    counts = [part.numel() for part in parts]
    if len(set(counts)) == 1:
        return group.run([x], parts, opts, lambda comm: _gather_parts(comm, parts, x))

    def call(comm: Communicator) -> None:
        whole = x.new_empty(sum(counts))
        given, out = movable(x.contiguous(), "tensor"), movable(whole, "tensor_list")
        comm.all_gather(given, out=out, counts=lengths(counts, whole, out))
        copy_out(whole, parts)

    return group.run([x], parts, opts, call)


def _of_several_lists(
    group: "ProcessGroup",
    outs: list[list[torch.Tensor]],
    tensors: list[torch.Tensor],
    opts: Any = None,
) -> AnyWork:
    """Runs dist.all_gather_coalesced: outs[rank][i] becomes that rank's tensors[i]."""
    for rank, its in enumerate(outs):
        check_as_many(its, tensors, (f"output_tensor_lists[{rank}]", "input_tensor_list"))
    by_tensor = [[its[number] for its in outs] for number in range(len(tensors))]
    for x, parts in zip(tensors, by_tensor, strict=True):
        check_equal(parts, x, "output_tensor_lists")

    def call(comm: Communicator) -> None:
        for x, parts in zip(tensors, by_tensor, strict=True):
            _gather_parts(comm, parts, x)

    results = [part for its in outs for part in its]
    check_one_device(tensors, "input_tensor_list")
    return group.run(tensors, results, opts, call)


def _of_tensors(
    group: "ProcessGroup", out: torch.Tensor, x: torch.Tensor, opts: Any = None
) -> AnyWork:
    """Runs dist.all_gather_into_tensor."""
    return _of_several_tensors(group, [out], [x], opts)


def _of_several_tensors(
    group: "ProcessGroup", outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
) -> AnyWork:
    """Runs dist.all_gather_into_tensor for several tensors, in turn. DTensor gives one tensor."""
    names = "input_tensor", "output_tensor"
    check_as_many(outs, tensors, (names[1], names[0]))

    def call(comm: Communicator) -> None:
        for out, x in zip(outs, tensors, strict=True):
            gather_into(comm, x, out, names)

    check_one_device(tensors, names[0])
    return group.run(tensors, outs, opts, call)


GROUP_METHODS = {
    "allgather": _of_lists,
    "allgather_coalesced": _of_several_lists,
    "_allgather_base": _of_tensors,
    "allgather_into_tensor_coalesced": _of_several_tensors,
    # PyTorch's names from version 2.13 on.
    "all_gather_single": _of_tensors,
    "all_gather_single_coalesced": _of_several_tensors,
}
