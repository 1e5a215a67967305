"""reduce for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ...comm import Communicator
from ..torch_calls import only, root_of
from ..torch_queue import AnyWork
from ..torch_reductions import reduction_of

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def _of_group(group: "ProcessGroup", tensors: list[torch.Tensor], opts: Any = None) -> AnyWork:
    """Runs dist.reduce. Only the root's tensor is overwritten."""
    x, root, reduction = only(tensors), root_of(opts), reduction_of(opts)
    out = x if group.rank() == root else None

    def call(comm: Communicator) -> None:
        reduction.make(
            x, out, ("tensor", "tensor"), lambda x, _: comm.reduce(x, root, op=reduction.op)
        )

    return group.run([x], tensors, opts, call)


GROUP_METHODS = {
    "reduce": _of_group,
}
