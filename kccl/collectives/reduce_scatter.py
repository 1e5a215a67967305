"""reduce_scatter: every rank gets its chunk of the reduction of all ranks' arrays."""

from collections.abc import Sequence
from typing import Any

from ..base import arrays
from ..base.arrays import ArrayView
from ..plan.ops import Op, check_op
from . import parts
from .all_to_all import check_divisible
from .collective import Case, Collective
from .prepared import Empty, Prepared


class ReduceScatter(Collective):
    """Every rank gets its chunk of the element-wise reduction of all ranks' arrays."""

    _NAME, _OPTIONS = "reduce_scatter", (("op", "sum"),)

    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        op: Op = "sum",
        counts: Sequence[int] | None = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """This rank's `out` gets the element-wise reduction of chunk `rank` of all ranks' `x`.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of a type that all_reduce takes.
                The same size and type on every rank. The size must be divisible by world_size,
                unless counts are given. Chunk p is the p-th of world_size equal parts.
            out: Array for the result, of x's type, with x.size / world_size elements. In place: out
                may be this rank's chunk of x. Otherwise x and out must not overlap. When None, an
                array is allocated as in all_gather. Its shape is (x.shape[0] / world_size,
                *x.shape[1:]) if world_size divides x.shape[0]; otherwise it has one dimension.
            op: As in all_reduce.
            counts: Number of elements that each rank gets, as in MPI's Reduce_scatter. See scatter.
                When None, every rank gets x.size / world_size elements.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or the allocated array. It has the same bits as this chunk of all_reduce's
            result.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent. Or the counts of the ranks
                differ; with more than 8 ranks only a check sum of 8 bits is compared.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        return self._call(self._case(x, out, op, counts), stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        *,
        out: Any = None,
        op: Op = "sum",
        counts: Sequence[int] | None = None,
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
        return self._prepare(
            self._case(x, out, op, counts), stream, channel, algorithm, blocks, threads
        )

    def _case(self, x: Any, out: Any, op: Op, counts: Any) -> Case:
        backend, world_size = self._context.backend, self._context.world_size
        view = backend.view(x, "x", writable=False)
        check_op(op, view.dtype)
        if counts is not None:
            return self._of_parts(x, view, out, op, parts.counts_of("counts", counts, world_size))
        check_divisible(view, world_size)
        count = view.count // world_size
        result = out
        if out is None:
            result = backend.like(x, view, arrays.shape_of_chunk(x, view, world_size))
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
            options=(op,),
            what=str(op),
            is_given=out is not None,
            own_offset=own_offset,
        )

    def _of_parts(self, x: Any, view: ArrayView, out: Any, op: Op, counts: tuple[int, ...]) -> Case:
        backend, rank = self._context.backend, self._context.rank
        parts.check_sum("counts", counts, "x", view)
        own = counts[rank : rank + 1]
        result = out
        if out is None:
            result = backend.like(x, view, parts.shape_of(x, view, counts, own))
        out_view = backend.view(result, "out", writable=True)
        own_offset = sum(counts[:rank]) * view.dtype.itemsize
        if out is not None:
            arrays.check_result(view, out_view, counts[rank], own_offset)
        receives = own * len(counts)
        longest = max(counts)
        made = parts.moved(view, counts, receives, longest=longest, kernel=parts.REDUCES)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=view.nbytes,
            count=made.longest,
            fields={"dtype": view.dtype.name, "op": op},
            options=(op,),
            what=f"{op}, counts {list(counts)}",
            is_given=out is not None,
            own_offset=own_offset,
            parts=made,
        )
