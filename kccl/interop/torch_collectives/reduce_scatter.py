"""reduce_scatter for PyTorch."""

from typing import TYPE_CHECKING, Any, cast

import torch

from ...base.errors import InvalidArgument
from ...comm import Communicator
from ...plan.ops import Op
from ..torch_calls import check_alike, check_as_many, check_equal, check_one_device, only
from ..torch_moves import laid_out_alike, through_contiguous
from ..torch_queue import AnyWork
from ..torch_reductions import Reduction, reduction_of
from ..torch_registry import DEFAULT, find
from ..torch_streams import Ordered
from ..torch_tensors import array

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def reduce_scatter(x: torch.Tensor, op: str = "sum", comm: str | None = None) -> torch.Tensor:
    """Returns this rank's chunk of the element-wise reduction of all ranks' x.

    Args:
        x: Tensor [world_size * n, ...], the same shape and dtype on every rank. If it is not
            C-contiguous, it is copied first.
        op: As in all_reduce.
        comm: As in all_reduce.

    Returns:
        A tensor [n, ...]: n rows of the reduction, from row rank * n on.

    Raises:
        As all_reduce.
    """
    result: torch.Tensor = _op(x, op, comm or DEFAULT)
    return result


@torch.library.custom_op("kccl::reduce_scatter", mutates_args=())
def _op(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    """See kccl.interop.torch.reduce_scatter."""
    ranks = find(comm)
    with Ordered(ranks, x.device):
        out = x.new_empty(_part(x, ranks))
        ranks.reduce_scatter(array(x.contiguous(), "x"), out=array(out, "out"), op=cast(Op, op))
        return out


def _part(x: torch.Tensor, ranks: Communicator) -> tuple[int, ...]:
    """Returns the shape of one rank's chunk of x."""
    if x.dim() == 0 or x.shape[0] % ranks.world_size != 0:
        raise InvalidArgument(
            f"x has shape {tuple(x.shape)}, must have a multiple of {ranks.world_size} rows, the "
            "world_size"
        )
    return (x.shape[0] // ranks.world_size, *x.shape[1:])


@_op.register_fake
def _fake(x: torch.Tensor, op: str, comm: str) -> torch.Tensor:
    return x.new_empty(_part(x, find(comm)))


def _scatter_into(
    comm: Communicator,
    reduction: Reduction,
    x: torch.Tensor,
    out: torch.Tensor,
    names: tuple[str, str],
) -> None:
    """Reduces all ranks' x, and stores this rank's chunk in out."""

    def scatter(x: Any, out: Any) -> None:
        comm.reduce_scatter(x, out=out, op=reduction.op)

    laid_out_alike(x, out, names, lambda x, out: reduction.make(x, out, names, scatter))


def _of_lists(
    group: "ProcessGroup",
    outs: list[torch.Tensor],
    tensors: list[list[torch.Tensor]],
    opts: Any = None,
) -> AnyWork:
    """Runs dist.reduce_scatter. Copies the inputs into one temporary tensor first."""
    out, parts, reduction = only(outs), only(tensors), reduction_of(opts)
    check_alike(parts, "input_list", group.size())
    check_equal([parts[group.rank()]], out, "input_list", group.rank())
    counts = [part.numel() for part in parts]
    is_even = len(set(counts)) == 1

    def call(comm: Communicator) -> None:
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        names = "input_list", "output"

        def scatter(x: Any, out: Any) -> None:
            comm.reduce_scatter(x, out=out, op=reduction.op, counts=None if is_even else counts)

        through_contiguous(out, lambda out: reduction.make(whole, out, names, scatter))

    return group.run(parts, [out], opts, call)


def _of_tensors(
    group: "ProcessGroup", out: torch.Tensor, x: torch.Tensor, opts: Any = None
) -> AnyWork:
    """Runs dist.reduce_scatter_tensor."""
    return _of_several_tensors(group, [out], [x], opts)


def _of_several_tensors(
    group: "ProcessGroup", outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
) -> AnyWork:
    """Runs dist.reduce_scatter_tensor for several tensors, in turn. DTensor gives one tensor."""
    reduction = reduction_of(opts)
    check_as_many(outs, tensors, ("output", "input"))

    def call(comm: Communicator) -> None:
        for out, x in zip(outs, tensors, strict=True):
            _scatter_into(comm, reduction, x, out, ("input", "output"))

    check_one_device(tensors, "input")
    return group.run(tensors, outs, opts, call)


GROUP_METHODS = {
    "reduce_scatter": _of_lists,
    "_reduce_scatter_base": _of_tensors,
    "reduce_scatter_tensor_coalesced": _of_several_tensors,
    # PyTorch's names from version 2.13 on.
    "reduce_scatter_single": _of_tensors,
    "reduce_scatter_single_coalesced": _of_several_tensors,
}
