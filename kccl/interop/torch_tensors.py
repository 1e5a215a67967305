"""Passes PyTorch's tensors to KCCL.

A host tensor is passed as a NumPy array, because the dispatcher in C takes such arrays without a
call of Python. With ml_dtypes the array can also be bfloat16, which NumPy's DLPack does not have.
"""

from typing import Any

import torch

from ..base import dlpack, dtypes
from ..base.errors import InvalidArgument

# Older versions of PyTorch have fewer types.
_DTYPES = {getattr(torch, dtype.name): dtype for dtype in dtypes.ALL if hasattr(torch, dtype.name)}
# Size in bytes of a dtype that NumPy has from ml_dtypes only -> the dtype as which a tensor of it
# is viewed first, because Tensor.numpy() refuses such a dtype.
_CARRIERS = {2: torch.int16, 1: torch.uint8}


def is_known(dtype: torch.dtype) -> bool:
    """Returns whether KCCL has this element type."""
    return dtype in _DTYPES


def array(x: torch.Tensor, name: str) -> Any:
    """Returns a tensor as an array for a communicator's collectives. The array shares the tensor's
    memory, and is detached from autograd.

    Args:
        x: A tensor on the host or a GPU.
        name: Name of the argument, for error messages.

    Raises:
        InvalidArgument: KCCL does not have its element type, it is sparse, or it is a view that
            conjugates or negates.
    """
    kind = _DTYPES.get(x.dtype)
    if kind is None:
        known = ", ".join(each.name for each in dtypes.ALL)
        raise InvalidArgument(
            f"{name} has dtype {x.dtype}, must be one of {known}, because this call computes; "
            f"{_instead(x.dtype)}. broadcast and all_gather take every dtype"
        )
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {x.layout}, must be torch.strided")
    if x.is_neg() or x.is_conj():
        dlpack.check_plain(x, name)
    if x.requires_grad:
        x = x.detach()
    if not x.is_cpu:
        return x
    if kind is dtypes.bfloat16 or kind.name.startswith("float8"):
        return x.view(_CARRIERS[kind.itemsize]).numpy().view(dtypes.to_numpy(kind))
    return x.numpy()


def memory(x: torch.Tensor, name: str) -> Any:
    """Returns array(x) for a call in which the order of the elements does not matter, as a sum in
    place: a tensor that is dense but not C-contiguous becomes a vector of its memory.
    """
    return array(x if is_contiguous(x, name) else dense(x, name), name)


def is_contiguous(x: torch.Tensor, name: str) -> bool:
    """Returns whether a tensor is C-contiguous. Raises InvalidArgument if it is sparse."""
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {x.layout}, must be torch.strided")
    return bool(x.is_contiguous())


def dense(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the memory of a tensor as a vector.

    Args:
        x: Its elements lie one after another in memory, in any order, as those of a tensor in
            torch.channels_last or of a transposed matrix do.
        name: Name of the argument, for error messages.

    Raises:
        InvalidArgument: Its elements overlap, or have others between them, or it is a view that
            conjugates or negates.
    """
    dlpack.check_plain(x, name)
    expected = 1
    # A dimension of one element may have any stride.
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                raise InvalidArgument(
                    f"{name} has shape {tuple(x.shape)} and strides {x.stride()}: its elements do "
                    "not lie one after another in memory, and must, as those of a tensor that is "
                    f"C-contiguous or in torch.channels_last: {name}.contiguous() makes a copy"
                )
            expected *= size
    return x.detach().as_strided((x.numel(),), (1,))


def _instead(dtype: torch.dtype) -> str:
    """Returns advice for an error: how to convert a tensor of a dtype that KCCL does not have."""
    if dtype.is_complex:
        return "reduce x.to(torch.complex64)"
    return "reduce x.to(torch.bfloat16)"
