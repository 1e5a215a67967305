"""Makes collectives that only move bits, for PyTorch's tensors of every dtype.

A tensor of a dtype that KCCL does not have, as complex32 or float8_e8m0fnu, is passed as uint8.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import dlpack
from ..base.errors import InvalidArgument
from ..comm import Communicator
from .torch_tensors import array, dense, is_contiguous, is_known, memory


def movable(x: torch.Tensor, name: str) -> Any:
    """Returns a tensor of any dtype as an array for a communicator's calls that only move bits.

    Args:
        x: A dense tensor. The array shares its memory. If x is not C-contiguous, the array is a
            vector.
        name: Name of the argument, for error messages.

    Raises:
        InvalidArgument: It is sparse, or a view that conjugates or negates, or not dense.
    """
    return memory(x, name) if is_known(x.dtype) else array(_bytes(x, name), name)


def laid_out_alike(
    x: torch.Tensor,
    out: torch.Tensor,
    names: tuple[str, str],
    call: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """Makes a call whose input or output has rows for each rank, on tensors whose elements lie in
    memory in the same order. Copies x and out if they do not lie so.

    Args:
        x: A dense tensor.
        out: The dense tensor that the call writes.
        names: Names of x and out in error messages.
        call: Gets x and out, or a C-contiguous copy of x and a C-contiguous tensor for the result.
    """
    if is_contiguous(x, names[0]) and is_contiguous(out, names[1]):
        call(x, out)
        return
    vectors = dense(x, names[0]), dense(out, names[1])
    whole, part = (x, out) if x.numel() > out.numel() else (out, x)
    if _holds_parts(whole, part):
        call(*vectors)
    else:
        through_contiguous(out, lambda out: call(x.contiguous(), out))


def _holds_parts(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Returns whether the memory of a dense tensor is that of tensors like `part`, concatenated or
    stacked along the first dimension.
    """
    more = whole.dim() - part.dim()
    return (
        more in (0, 1)
        and whole.shape[1:] == part.shape[1 - more :]
        and whole.stride()[more:] == part.stride()
        and whole.stride(0) * whole.shape[0] == whole.numel()
    )


def through_contiguous(out: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
    """Makes a call that writes `out` in the order of its elements: through a temporary tensor if it
    is not C-contiguous.
    """
    if out.is_contiguous():
        call(out)
        return
    result = torch.empty_like(out, memory_format=torch.contiguous_format)
    call(result)
    out.detach().copy_(result)


def move_in_place(comm: Communicator, x: torch.Tensor, root: int, name: str) -> None:
    """Copies the root's x into x on every rank.

    Args:
        comm: The communicator for the device of x.
        x: A dense tensor of any dtype.
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
        x: A dense tensor of any dtype.
        out: Dense, of the same dtype, with world_size times as many elements.
        names: Names of x and out in error messages.
    """
    check_whole(out, x, comm.world_size, (names[1], names[0]))

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        comm.all_gather(movable(x, names[0]), out=movable(out, names[1]))

    laid_out_alike(x, out, names, call)


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
    vector = x.detach().view(-1) if is_contiguous(x, name) else dense(x, name)
    dlpack.check_plain(vector, name)
    return vector.view(torch.uint8)


def lengths(counts: Sequence[int], x: torch.Tensor, moved: Any) -> list[int]:
    """Converts counts of elements of x to counts of elements of `moved`, which is movable(x)."""
    scale = x.dtype.itemsize // moved.dtype.itemsize
    return [scale * each for each in counts]


def copy_out(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copies consecutive elements of a vector to `parts`, one part after another."""
    counts = [part.numel() for part in parts]
    for part, its in zip(parts, whole.split(counts), strict=True):
        part.detach().copy_(its.view(part.shape))
