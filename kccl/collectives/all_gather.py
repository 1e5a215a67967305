"""all_gather: every rank ends with all ranks' arrays, one after the other."""

from typing import Any

from ..base import arrays
from .prepared import Case, Collective, Empty, Prepared


class AllGather(Collective):
    """Every rank gets all ranks' arrays, in rank order."""

    _NAME = "all_gather"

    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Every rank's `out` becomes all ranks' `x` in rank order, bit by bit.

        Args:
            x: Array of any shape, C-contiguous: float32, float64, float16, bfloat16, int32, int64.
                The same size and type on every rank.
            out: Array for the result, of x's type and world_size * x.size elements, of any shape,
                C-contiguous. x may be this rank's chunk of it, elements rank * x.size and on, and
                else does not overlap it. When None one of shape (world_size, *x.shape) is
                allocated: by NumPy on the host; on a GPU by PyTorch or CuPy, whichever x belongs
                to, and out must be given where x belongs to neither.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or what was allocated.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not come, or went.
        """
        return self._call(self._case(x, out), stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        *,
        out: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
        blocks: int = 0,
        threads: int = 0,
    ) -> Prepared | Empty:
        """Plans the call once; `op()` on what it returns makes it, as often as wanted.

        Arguments, result and errors as in the call itself and in all_reduce.prepare. The arrays
        stay referenced; every call returns the same one.
        """
        return self._prepare(self._case(x, out), stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, out: Any) -> Case:
        backend, world_size = self._context.backend, self._context.world_size
        view = backend.view(x, "x", writable=False)
        own_offset = self._context.rank * view.nbytes
        result = out
        if out is None:
            result = backend.like(x, view, (world_size, *arrays.shape(x, view)))
        out_view = backend.view(result, "out", writable=True)
        if out is not None:
            arrays.check_result(view, out_view, world_size * view.count, own_offset)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=out_view.nbytes,
            count=view.nbytes,
            fields={},
            is_given=out is not None,
            own_offset=own_offset,
        )
