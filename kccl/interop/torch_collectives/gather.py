"""gather for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ...comm import Communicator
from ..torch_calls import check_alike, check_equal, only, root_of
from ..torch_errors import InvalidArgument
from ..torch_moves import check_whole, movable, through_contiguous
from ..torch_queue import AnyWork

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def _of_lists(
    group: "ProcessGroup",
    outs: list[list[torch.Tensor]],
    tensors: list[torch.Tensor],
    opts: Any = None,
) -> AnyWork:
    """Runs dist.gather, for any dtype. All ranks' tensors must have the same size."""
    x, root = only(tensors), root_of(opts)
    if group.rank() != root:
        if outs and outs[0]:
            raise InvalidArgument("gather_list has tensors, must be empty on ranks but the root")
        return group.run([x], [], opts, lambda comm: _give(comm, x, root))
    parts = only(outs)
    check_alike(parts, "gather_list", group.size())
    check_equal(parts, x, "gather_list")

    def call(comm: Communicator) -> None:
        whole = x.new_empty((len(parts), *x.shape))
        comm.gather(movable(x.contiguous(), "tensor"), root, out=movable(whole, "gather_list"))
        for part, its in zip(parts, whole, strict=True):
            part.detach().copy_(its)

    return group.run([x], parts, opts, call)


def _of_tensors(
    group: "ProcessGroup", out: torch.Tensor, x: torch.Tensor, opts: Any = None
) -> AnyWork:
    """Runs dist.gather_single, for any dtype. Only the root's output is written."""
    root = root_of(opts)
    if group.rank() != root:
        return group.run([x], [], opts, lambda comm: _give(comm, x, root))

    def call(comm: Communicator) -> None:
        check_whole(out, x, comm.world_size, ("output", "input"))
        given = movable(x.contiguous(), "input")
        through_contiguous(out, lambda out: comm.gather(given, root, out=movable(out, "output")))

    return group.run([x], [out], opts, call)


def _give(comm: Communicator, x: torch.Tensor, root: int) -> None:
    # In the order of the elements, because only the root knows how its output lies in memory.
    comm.gather(movable(x.contiguous(), "tensor"), root)


GROUP_METHODS = {
    "gather": _of_lists,
    "gather_into_tensor": _of_tensors,
    # PyTorch's name from version 2.14 on.
    "gather_single": _of_tensors,
}
