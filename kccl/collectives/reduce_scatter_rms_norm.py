"""reduce_scatter_rms_norm: each rank gets its normalised rows of the sum of all ranks' arrays."""

from typing import Any

from ..base import arrays
from ..base.arrays import ArrayView
from .norm import NormCase, check
from .normed import Normed
from .prepared import Empty, Prepared


class ReduceScatterRmsNorm(Normed):
    """Each rank gets its normalised rows of the sum of all ranks' arrays."""

    _NAME, _SUM = "reduce_scatter_rms_norm", "reduce_scatter"

    def __call__(
        self,
        x: Any,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        out: Any = None,
        scale: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Sums x over the ranks; this rank adds the residual to its rows and normalises them.

        This is for sequence parallelism, where each rank has some of the rows between layers;
        all_gather then gives every rank all rows. The bits are those of the same rows of
        all_reduce_rms_norm. As there, no rank may give memory that another rank's call writes.

        Args:
            x: Array [..., width] of float32, float16 or bfloat16, strided ones as in all_reduce.
                The same size and type on every rank. The number of rows must be divisible by
                world_size.
            residual: Array of this rank's rows, of the type of x, or None for no residual. `hidden`
                of these rows is stored in it, rounded to its type.
            weight, eps, scale: As in all_reduce_rms_norm.
            out: Array for this rank's rows; float8_e4m3fn where scale is given. It must not
                overlap x, not even with one rank. When None, an array of x's type is allocated: of
                x's shape with fewer rows, or a matrix if world_size does not divide the first
                dimension.
            stream, channel: As in all_reduce.
            algorithm: As in reduce_scatter.

        Returns:
            `out`, or the allocated array.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        case = self._checked(x, residual, weight, eps, out, scale)
        return self._call_normed(case, stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        out: Any = None,
        scale: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Prepared | Empty:
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself. The object keeps the arrays
        alive. Each `op()` returns the same result array.
        """
        case = self._checked(x, residual, weight, eps, out, scale)
        return self._prepare_normed(case, stream, channel, algorithm)

    def _checked(
        self, x: Any, residual: Any, weight: Any, eps: Any, out: Any, scale: Any
    ) -> NormCase:
        backend, parts = self._context.backend, self._context.world_size
        if out is None and scale is None:
            # Makes an array of the right type. If x is wrong, check() raises the error.
            view = backend.view(x, "x", writable=False)
            out = backend.like(x, view, _shape_of_part(x, view, parts))
        given = x, residual, weight, eps, out, scale
        return check(backend.view, *given, parts=parts, may_be_in_place=False)


def _shape_of_part(x: Any, view: ArrayView, parts: int) -> tuple[int, ...]:
    """Returns the shape of one of `parts` equal parts of x's rows. If `parts` does not divide the
    first dimension, it is that of a matrix.
    """
    *rows, width = arrays.shape(x, view) or (0,)
    if rows and width and rows[0] % parts:
        return view.count // width // parts, width
    return arrays.shape_of_chunk(x, view, parts)
