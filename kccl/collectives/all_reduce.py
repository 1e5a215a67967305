"""all_reduce: every rank ends with the reduction of all ranks' arrays."""

from typing import Any

from ..base import arrays
from .prepared import ArrayT, Case, Collective, Empty, Prepared
from .reduction import Op, check_op


class AllReduce(Collective):
    """Every rank gets the element-wise reduction of all ranks' arrays."""

    _NAME, _OPTION, _DEFAULT = "all_reduce", "op", "sum"

    def __call__(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        op: Op = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> ArrayT:
        """Every rank's `out` becomes the element-wise reduction of all ranks' `x`.

        Args:
            x: Array of any shape, C-contiguous: float32, float64, float16, bfloat16, int32, int64.
                The same size and type on every rank.
            out: Array for the result, same size and type; x itself when None.
            op: "sum", "prod", "min", "max", or for floats "avg".
            stream: On a GPU, where the call is enqueued: an integer, or something with
                __cuda_stream__; the current stream of x's library when None. On the host None.
            channel: Independent stream of calls, below `comm.num_channels`.
            algorithm: Name of the algorithm to use; the plan's choice when "".

        Returns:
            `out`, or x. The same bits on every rank.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not come, or went.
        """
        result: ArrayT = self._call(self._case(x, out, op), stream, channel, algorithm)
        return result

    def prepare(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        op: Op = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
        blocks: int = 0,
        threads: int = 0,
    ) -> Prepared | Empty:
        """Plans the call once; `op()` on what it returns makes it, as often as wanted.

        Arguments, result and errors as in the call itself, besides `blocks` and `threads`, which
        are for tuning calls on a GPU: at most so many blocks, of so many threads while there are
        blocks for them. Both or neither; the plan's choice when 0. The arrays stay referenced.
        """
        return self._prepare(self._case(x, out, op), stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, out: Any, op: str) -> Case:
        view = self._context.backend.view(x, "x", writable=out is None)
        check_op(op, view.dtype)
        result, out_view = x, view
        if out is not None:
            result, out_view = out, self._context.backend.view(out, "out", writable=True)
            arrays.check_result(view, out_view, view.count, 0)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=view.nbytes,
            count=view.count,
            fields={"dtype": view.dtype.name, "op": op},
            option=op,
            what=op,
            is_given=out is not None,
        )
