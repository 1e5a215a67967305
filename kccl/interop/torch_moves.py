"""Collectives of PyTorch's tensors that only move bits: they take every dtype.

KCCL has six element types. A tensor of another type, as bool, uint8, float8 or complex, travels as
int32. If its bytes are no whole number of those, it travels in a copy that is a little longer.
"""

import torch

from ..base.errors import InvalidArgument
from ..comm import Communicator
from .torch_tensors import array, is_known

_WORD = torch.int32


def move_in_place(comm: Communicator, x: torch.Tensor, root: int, name: str) -> None:
    """Copies the root's x into x on every rank.

    Args:
        comm: The communicator for the device of x.
        x: A C-contiguous tensor of any dtype.
        root: The rank whose tensor is copied.
        name: Name of x in error messages.
    """
    if is_known(x.dtype):
        comm.broadcast(array(x, name), root)
        return
    carrier = _words(x, name)
    comm.broadcast(array(carrier, name), root)
    _unpack(carrier, x)


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
    if is_known(x.dtype):
        comm.all_gather(array(x, names[0]), out=array(out, names[1]))
        return
    want = comm.world_size * x.numel()
    if out.dtype != x.dtype or out.numel() != want:
        raise InvalidArgument(
            f"{names[1]} has {out.numel()} elements of {out.dtype}, must have {want} of {x.dtype}: "
            f"those of {names[0]} on {comm.world_size} ranks"
        )
    mine, everyone = _words(x, names[0]), _words(out, names[1])
    if mine.nbytes == x.nbytes:
        comm.all_gather(array(mine, names[0]), out=array(everyone, names[1]))
        _unpack(everyone, out)
        return
    # Each rank's part has padding at its end.
    padded = mine.new_empty(comm.world_size, mine.numel())
    comm.all_gather(array(mine, names[0]), out=array(padded, names[1]))
    parts = padded.view(torch.uint8)[:, : x.nbytes]
    _bytes(out, names[1]).view(comm.world_size, -1).copy_(parts)


def _bytes(x: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor's memory as a vector of bytes.

    Raises:
        InvalidArgument: Its memory does not hold its elements one after another.
    """
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {x.layout}, must be torch.strided")
    if x.is_conj():
        raise InvalidArgument(
            f"{name} is a view that conjugates the memory behind it, must be a tensor with its own "
            f"values: {name}.resolve_conj() makes one"
        )
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name} has shape {tuple(x.shape)} and is not C-contiguous, must be C-contiguous: "
            f"{name}.contiguous() makes a copy that is"
        )
    return x.detach().view(-1).view(torch.uint8)


def _words(x: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor's bytes as words: its own memory where that can be viewed so, else a padded copy."""
    own = _bytes(x, name)
    size = _WORD.itemsize
    if own.nbytes % size == 0 and own.storage_offset() % size == 0 and own.data_ptr() % size == 0:
        return own.view(_WORD)
    copy = own.new_zeros(-(-own.nbytes // size) * size)
    copy[: own.nbytes] = own
    return copy.view(_WORD)


def _unpack(words: torch.Tensor, x: torch.Tensor) -> None:
    """Copies the bytes of _words(x) back into x, unless they are its own memory."""
    if words.data_ptr() != x.data_ptr():
        _bytes(x, "").copy_(words.view(torch.uint8)[: x.nbytes])
