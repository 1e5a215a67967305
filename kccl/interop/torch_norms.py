"""rms_norm, all_reduce_rms_norm and reduce_scatter_rms_norm for PyTorch, as custom ops that
torch.compile takes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..base.errors import Error, InvalidArgument
from ..collectives.rms_norm import rms_norm as _rms_norm
from .torch_errors import of_torch
from .torch_registry import DEFAULT, find
from .torch_streams import Ordered
from .torch_tensors import array


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the rows of x, normalised as by torch.nn.functional.rms_norm, in a new tensor.

    The result has the same bits on the host and on every GPU; see kccl.rms_norm.

    Args:
        x: Tensor [..., width] of float32, float16 or bfloat16. If it is not C-contiguous, it is
            copied first.
        weight: Tensor [width] of the same dtype.
        eps: Number that is not negative.

    Returns:
        A C-contiguous tensor of the shape of x.

    Raises:
        InvalidArgument: An argument is wrong. It is a ValueError and a RuntimeError.
    """
    result: torch.Tensor = _norm(x, weight, eps)
    return result


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    comm: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds all ranks' x and the residual. Returns the sum's normalised rows, and the sum.

    Args:
        x, residual, weight, eps: As in comm.all_reduce_rms_norm, and residual has the shape of x.
            If x is not C-contiguous, it is copied first. The residual is not changed.
        scale: Tensor of one float32. The normalised rows are divided by it, and their dtype is
            torch.float8_e4m3fn.
        comm: Name of a registered communicator; "default" when None.

    Returns:
        (normalised, sum), C-contiguous tensors of the shape of x.

    Raises:
        Error: No communicator has this name.
        InvalidArgument: An argument is wrong; nothing was sent. It is a ValueError and a
            RuntimeError.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _op(
        x, residual, weight, eps, scale, comm or DEFAULT
    )
    return result


def all_reduce_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    comm: str | None = None,
) -> torch.Tensor:
    """Makes all_reduce_rms_norm() in place: x gets the normalised rows, and the residual the sum.

    All tensors must be C-contiguous. Returns x.
    """
    _op_in_place(x, residual, weight, eps, comm or DEFAULT)
    return x


def reduce_scatter_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    comm: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds this rank's rows of all ranks' x and the residual. Returns the sum normalised, and the
    sum.

    all_gather() of the results gives every rank all rows.

    Args:
        x: Tensor [world_size * n, ..., width], the same shape and dtype on every rank. If it is not
            C-contiguous, it is copied first.
        residual: Tensor [n, ..., width] of this rank's rows. It is not changed.
        weight, eps, scale, comm: As in all_reduce_rms_norm.

    Returns:
        (normalised, sum), C-contiguous tensors of the shape of the residual.

    Raises:
        As all_reduce_rms_norm.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _op_of_parts(
        x, residual, weight, eps, scale, comm or DEFAULT
    )
    return result


@contextmanager
def _errors_of_torch() -> Iterator[None]:
    try:
        yield
    except Error as error:
        raise of_torch(error) from None


@torch.library.custom_op("kccl::rms_norm", mutates_args=())
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kccl.interop.torch.rms_norm."""
    with _errors_of_torch():
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        names = ("x", x.contiguous()), ("weight", weight), ("out", out)
        rows, weights, to = (array(tensor, name) for name, tensor in names)
        _rms_norm(rows, weights, eps, out=to)
        return out


@_norm.register_fake
def _fake_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("kccl::all_reduce_rms_norm", mutates_args=())
def _op(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    comm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kccl.interop.torch.all_reduce_rms_norm."""
    with _errors_of_torch():
        ranks = find(comm)
        with Ordered(ranks, x.device):
            _check_shapes(x, residual)
            total = residual.clone(memory_format=torch.contiguous_format)
            out = _like(total, scale)
            ranks.all_reduce_rms_norm(
                array(x.contiguous(), "x"),
                array(total, "residual"),
                array(weight, "weight"),
                eps,
                out=array(out, "out"),
                scale=None if scale is None else array(scale, "scale"),
            )
            return out, total


@_op.register_fake
def _fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    comm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    find(comm)
    with _errors_of_torch():
        _check_shapes(x, residual)
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return _like(total, scale), total


def _check_shapes(x: torch.Tensor, residual: torch.Tensor) -> None:
    if x.shape != residual.shape:
        raise InvalidArgument(
            f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}: must be equal"
        )


def _like(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Returns a new tensor for the normalised rows of `total`."""
    return torch.empty_like(total, dtype=total.dtype if scale is None else torch.float8_e4m3fn)


@torch.library.custom_op("kccl::reduce_scatter_rms_norm", mutates_args=())
def _op_of_parts(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    comm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kccl.interop.torch.reduce_scatter_rms_norm."""
    with _errors_of_torch():
        ranks = find(comm)
        with Ordered(ranks, x.device):
            total = residual.clone(memory_format=torch.contiguous_format)
            out = _like(total, scale)
            ranks.reduce_scatter_rms_norm(
                array(x.contiguous(), "x"),
                array(total, "residual"),
                array(weight, "weight"),
                eps,
                out=array(out, "out"),
                scale=None if scale is None else array(scale, "scale"),
            )
            return out, total


@_op_of_parts.register_fake
def _fake_of_parts(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    comm: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    find(comm)
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return _like(total, scale), total


@torch.library.custom_op("kccl::all_reduce_rms_norm_", mutates_args=("x", "residual"))
def _op_in_place(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: str
) -> None:
    """See kccl.interop.torch.all_reduce_rms_norm_."""
    with _errors_of_torch():
        ranks = find(comm)
        with Ordered(ranks, x.device):
            ranks.all_reduce_rms_norm(
                array(x, "x"), array(residual, "residual"), array(weight, "weight"), eps
            )
