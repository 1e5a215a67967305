"""scatter for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ...comm import Communicator
from ..torch_calls import check_alike, check_equal, only, root_of
from ..torch_errors import InvalidArgument
from ..torch_moves import movable, through_contiguous
from ..torch_queue import AnyWork

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def _of_lists(
    group: "ProcessGroup",
    outs: list[torch.Tensor],
    tensors: list[list[torch.Tensor]],
    opts: Any = None,
) -> AnyWork:
    """Runs dist.scatter, for any dtype. All ranks' tensors must have the same size."""
    out, root = only(outs), root_of(opts)
    if group.rank() != root:
        if tensors and tensors[0]:
            raise InvalidArgument("scatter_list has tensors, must be empty on ranks but the root")
        return group.run([], outs, opts, lambda comm: _take(comm, out, root))
    parts = only(tensors)
    check_alike(parts, "scatter_list", group.size())
    check_equal(parts, out, "scatter_list")

    def call(comm: Communicator) -> None:
        whole = torch.stack([part.detach() for part in parts]).contiguous()
        given = movable(whole, "scatter_list")
        through_contiguous(out, lambda out: comm.scatter(given, root, out=movable(out, "tensor")))

    return group.run(parts, outs, opts, call)


def _take(comm: Communicator, out: torch.Tensor, root: int) -> None:
    through_contiguous(out, lambda out: comm.scatter(None, root, out=movable(out, "tensor")))


GROUP_METHODS = {
    "scatter": _of_lists,
}
