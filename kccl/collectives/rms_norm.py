"""rms_norm: normalises rows, without a communicator."""

from typing import Any

from ..backends.alone import place_of
from .collective import ArrayT
from .norm import check


def rms_norm(
    x: ArrayT,
    weight: Any,
    eps: float,
    *,
    residual: Any = None,
    out: ArrayT | None = None,
    scale: Any = None,
    stream: Any = None,
) -> ArrayT:
    """Normalises each row of x, or of x + residual, by the root of the mean of its squares.

        hidden = x + residual
        out = hidden / sqrt(mean(hidden * hidden) + eps) * weight

    The sum with the residual is rounded to the type of x, and stored in `residual`. The rest is
    computed in float32 and rounded once. Squares are added in an order that depends on the length
    of a row only, so the bits are the same on every device. csrc/include/kccl/norm.cuh has this
    order. For float16 and bfloat16 the result differs from that of torch.nn.functional.rms_norm by
    at most one unit in the last place.

    Args:
        x: C-contiguous array [..., width] of float32, float16 or bfloat16, on the host or a GPU.
        weight: Array [width] of the same type.
        eps: Number that is not negative. It is rounded to float32.
        residual: Array of the size and type of x, in which the sum is stored; None for no residual.
        out: Array for the result, of the size and type of x; float8_e4m3fn where scale is given.
            When None, x: the call is in place.
        scale: Array of one float32. The result is divided by it, clamped to [-448, 448], and
            rounded to float8_e4m3fn once.
        stream: As in all_reduce.

    Returns:
        `out`, or x.

    Raises:
        InvalidArgument: An argument is wrong; nothing was written.
        BackendError, CompileError: The GPU cannot be used.
    """
    place = place_of(x)
    case = check(place.view, x, residual, weight, eps, out, scale)
    on = place.stream(stream, case.x, case.inputs())
    if case.x.count:
        place.run(
            "rms_norm",
            case.x.dtype.name,
            on,
            input=case.x.address,
            output=case.out.address,
            **case.fields(),
            **case.addresses(),
        )
    result: ArrayT = case.result
    return result
