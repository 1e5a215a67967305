"""reduce_scatter: every rank gets its chunk of the reduction of all ranks' arrays."""

from typing import Any

from ..base import arrays
from ..base.errors import InvalidArgument
from ..plan.ops import Op, check_op
from .collective import Case, Collective
from .prepared import Empty, Prepared


class ReduceScatter(Collective):
    """Every rank gets its chunk of the element-wise reduction of all ranks' arrays."""

    _NAME, _OPTION, _DEFAULT = "reduce_scatter", "op", "sum"

    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        op: Op = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """This rank's `out` gets the element-wise reduction of chunk `rank` of all ranks' `x`.

        Args:
            x: C-contiguous array of any shape: float32, float64, float16, bfloat16, int32, int64.
                The same size and type on every rank. The size must be divisible by world_size.
                Chunk p is the p-th of world_size equal parts.
            out: Array for the result: C-contiguous, of x's type, with x.size / world_size elements.
                In place: out may be this rank's chunk of x. Otherwise x and out must not overlap.
                When None, an array is allocated as in all_gather. Its shape is
                (x.shape[0] / world_size, *x.shape[1:]) if world_size divides x.shape[0]; otherwise
                it has one dimension.
            op: "sum", "prod", "min", "max", or for floats "avg".
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or the allocated array. It has the same bits as this chunk of all_reduce's
            result.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not come, or went.
        """
        return self._call(self._case(x, out, op), stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        *,
        out: Any = None,
        op: Op = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
        blocks: int = 0,
        threads: int = 0,
    ) -> Prepared | Empty:
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself and of all_reduce.prepare. The
        object keeps the arrays alive. Each `op()` returns the same result array.
        """
        return self._prepare(self._case(x, out, op), stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, out: Any, op: str) -> Case:
        backend, world_size = self._context.backend, self._context.world_size
        view = backend.view(x, "x", writable=False)
        check_op(op, view.dtype)
        count, rest = divmod(view.count, world_size)
        if rest:
            raise InvalidArgument(
                f"x has {view.count} elements, must be divisible by world_size, {world_size}"
            )
        result = out
        if out is None:
            whole = arrays.shape(x, view)
            is_split = bool(whole) and whole[0] % world_size == 0
            shape = (whole[0] // world_size, *whole[1:]) if is_split else (count,)
            result = backend.like(x, view, shape)
        out_view = backend.view(result, "out", writable=True)
        own_offset = self._context.rank * count * view.dtype.itemsize
        if out is not None:
            arrays.check_result(view, out_view, count, own_offset)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=view.nbytes,
            count=count,
            fields={"dtype": view.dtype.name, "op": op},
            option=op,
            what=op,
            is_given=out is not None,
            own_offset=own_offset,
        )
