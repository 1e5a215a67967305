"""Makes collectives that only move bits, for PyTorch's tensors of every dtype.

A tensor of a dtype that KCCL does not have, as complex32 or float8_e8m0fnu, is passed as uint8.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..base import dlpack
from ..base.errors import InvalidArgument
from ..comm import Communicator
from .torch_tensors import array, is_known


def movable(x: torch.Tensor, name: str) -> Any:
    """Returns a tensor of any dtype as an array for a communicator's calls that only move bits.

    Args:
        x: A C-contiguous tensor. The array shares its memory.
        name: Name of the argument, for error messages.

    Raises:
        InvalidArgument: It is sparse, or a view that conjugates or negates, or not C-contiguous.
    """
    return array(x if is_known(x.dtype) else _bytes(x, name), name)


def move_in_place(comm: Communicator, x: torch.Tensor, root: int, name: str) -> None:
    """Copies the root's x into x on every rank.

    Args:
        comm: The communicator for the device of x.
        x: A C-contiguous tensor of any dtype.
        root: The rank whose tensor is copied.
        name: Name of x in error messages.
    """
    comm.broadcast(movable(x, name), root)


def gather_into(
    comm: Communicator, x: torch.Tensor, out: torch.Tensor, names: tuple[str, str]
) -> None:
    """Copies all ranks' x into out, in rank order.

    Args:
        comm: The communicator for the device of x.
        x: A C-contiguous tensor of any dtype.
        out: C-contiguous, of the same dtype, with world_size times as many elements.
        names: Names of x and out in error messages.
    """
    check_whole(out, x, comm.world_size, (names[1], names[0]))
    comm.all_gather(movable(x, names[0]), out=movable(out, names[1]))


def check_whole(
    whole: torch.Tensor, part: torch.Tensor, world_size: int, names: tuple[str, str]
) -> None:
    """Checks the dtype and size of a tensor that holds a part for each rank.

    It checks only dtypes that are passed as bytes, because KCCL checks the others itself.

    Raises:
        InvalidArgument: `whole` has another size than `world_size` parts, or another dtype.
    """
    want = world_size * part.numel()
    if not is_known(part.dtype) and (whole.dtype != part.dtype or whole.numel() != want):
        raise InvalidArgument(
            f"{names[0]} has {whole.numel()} elements of {whole.dtype}, must have {want} of "
            f"{part.dtype}: those of {names[1]} on {world_size} ranks"
        )


def _bytes(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a tensor's memory as a vector of bytes.

    Raises:
        InvalidArgument: Its memory does not hold its elements one after another.
    """
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {x.layout}, must be torch.strided")
    dlpack.check_plain(x, name)
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name} has shape {tuple(x.shape)} and is not C-contiguous, must be C-contiguous: "
            f"{name}.contiguous() makes a copy that is"
        )
    return x.detach().view(-1).view(torch.uint8)


def lengths(counts: Sequence[int], x: torch.Tensor, moved: Any) -> list[int]:
    """Converts counts of elements of x to counts of elements of `moved`, which is movable(x)."""
    scale = x.dtype.itemsize // moved.dtype.itemsize
    return [scale * each for each in counts]


def copy_out(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copies consecutive elements of a vector to `parts`, one part after another."""
    counts = [part.numel() for part in parts]
    for part, its in zip(parts, whole.split(counts), strict=True):
        part.detach().copy_(its.view(part.shape))
