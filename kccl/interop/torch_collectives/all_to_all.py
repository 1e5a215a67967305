"""all_to_all for PyTorch."""

from typing import TYPE_CHECKING, Any

import torch

from ...comm import Communicator
from ..torch_calls import check_alike
from ..torch_errors import InvalidArgument
from ..torch_moves import copy_out, laid_out_alike, lengths, movable
from ..torch_queue import AnyWork

if TYPE_CHECKING:
    from ..torch_group import ProcessGroup


def _of_lists(
    group: "ProcessGroup", outs: list[torch.Tensor], ins: list[torch.Tensor], opts: Any = None
) -> AnyWork:
    """Runs dist.all_to_all, for any dtype. Each pair of ranks may have its own length.

    Copies the inputs into one temporary tensor, and the outputs out of another one.
    """
    world_size = group.size()
    check_alike(ins, "input_tensor_list", world_size)
    check_alike(outs, "output_tensor_list", world_size)
    if outs[0].dtype != ins[0].dtype or outs[0].device != ins[0].device:
        raise InvalidArgument(
            f"output_tensor_list has {outs[0].dtype} on {outs[0].device}, and input_tensor_list "
            f"{ins[0].dtype} on {ins[0].device}: must be alike"
        )
    sends, receives = [x.numel() for x in ins], [x.numel() for x in outs]

    def call(comm: Communicator) -> None:
        whole = torch.cat([x.detach().reshape(-1) for x in ins])
        out = whole.new_empty(sum(receives))
        # Always passes counts: a rank whose lengths are equal does not know whether all ranks' are.
        _exchange(comm, out, whole, receives, sends)
        copy_out(out, outs)

    return group.run(ins, outs, opts, call)


def _exchange(
    comm: Communicator,
    out: torch.Tensor,
    x: torch.Tensor,
    receives: list[int],
    sends: list[int],
) -> None:
    """Calls all_to_all with counts: the elements from each rank, and those to each rank."""
    given, taken = movable(x, "input"), movable(out, "output")
    send_counts, recv_counts = lengths(sends, x, given), lengths(receives, out, taken)
    comm.all_to_all(given, out=taken, send_counts=send_counts, recv_counts=recv_counts)


def _of_tensors(
    group: "ProcessGroup",
    out: torch.Tensor,
    x: torch.Tensor,
    receives: list[int],
    sends: list[int],
    opts: Any = None,
) -> AnyWork:
    """Runs dist.all_to_all_single, for any dtype.

    `receives` and `sends` are numbers of rows, one a rank. An empty list means equal parts.
    """
    world_size = group.size()
    if out.dtype != x.dtype or out.device != x.device:
        raise InvalidArgument(
            f"output is {out.dtype} on {out.device}, and input {x.dtype} on {x.device}: must be "
            "alike"
        )
    if not receives and not sends:
        _check_rows(x, world_size, "input")
        _check_rows(out, world_size, "output")
        if x.numel() != out.numel():
            raise InvalidArgument(
                f"output has {out.numel()} elements, and input {x.numel()}: must have as many"
            )

        def exchange(comm: Communicator, out: torch.Tensor, x: torch.Tensor) -> None:
            comm.all_to_all(movable(x, "input"), out=movable(out, "output"))
    else:
        received = _elements(out, receives, world_size, "output")
        sent = _elements(x, sends, world_size, "input")

        def exchange(comm: Communicator, out: torch.Tensor, x: torch.Tensor) -> None:
            _exchange(comm, out, x, received, sent)

    def call(comm: Communicator) -> None:
        names = "input", "output"
        laid_out_alike(x, out, names, lambda x, out: exchange(comm, out, x))

    return group.run([x], [out], opts, call)


def _check_rows(x: torch.Tensor, world_size: int, name: str) -> None:
    if x.dim() == 0 or x.shape[0] % world_size:
        raise InvalidArgument(
            f"Tensor's dim 0 does not divide equally across group size: {name} has shape "
            f"{tuple(x.shape)}, and the group {world_size} ranks"
        )


def _elements(x: torch.Tensor, sizes: list[int], world_size: int, name: str) -> list[int]:
    """Returns the number of elements of each rank's part of `x`.

    `sizes` are the parts' numbers of rows. An empty list means equal parts.
    """
    if not sizes:
        _check_rows(x, world_size, name)
        return [x.numel() // world_size] * world_size
    if len(sizes) != world_size:
        raise InvalidArgument(
            f"{name}_split_sizes has {len(sizes)} entries, must have {world_size}, one a rank: "
            "Number of tensor splits not equal to group size"
        )
    rows = x.shape[0] if x.dim() else 0
    if sum(sizes) != rows or min(sizes) < 0:
        raise InvalidArgument(
            f"{name}_split_sizes is {sizes}, and {name} has {rows} rows: Split sizes doesn't "
            "match total dim 0 size"
        )
    row = x.numel() // rows if rows else 0
    return [row * each for each in sizes]


GROUP_METHODS = {
    "alltoall": _of_lists,
    "alltoall_base": _of_tensors,
    # PyTorch's name from version 2.14 on.
    "all_to_all_single": _of_tensors,
}
