"""all_gather: every rank gets all ranks' arrays, one after another."""

from collections.abc import Sequence
from typing import Any

from ..base import arrays
from ..base.arrays import ArrayView
from . import parts
from .collective import Case, Collective
from .prepared import Empty, Prepared


class AllGather(Collective):
    """Every rank gets all ranks' arrays, in rank order."""

    _NAME = "all_gather"

    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Every rank's `out` gets all ranks' `x`, in rank order and bit by bit.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of any type without Python
                objects. The same size and type on every rank, unless counts are given.
            out: Array for the result, of x's type, with world_size * x.size elements. In place: x
                may be this rank's chunk of out, the x.size elements from rank * x.size on.
                Otherwise x and out must not overlap. When None, an array of shape (world_size,
                *x.shape) is allocated: on the host by NumPy, on a GPU by PyTorch or CuPy if x is
                theirs. For other arrays on a GPU, out must be given.
            counts: Number of elements of each rank, as in MPI's Allgatherv: integers of at least 0,
                the same on every rank. counts[rank] must be x.size. out has sum(counts) elements,
                in rank order. If all counts are whole rows of x, an allocated array keeps x's
                dimensions except the first; otherwise it has one dimension. When None, every rank
                has x.size elements.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or the allocated array.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent. Or the counts of the ranks
                differ; with more than 8 ranks only a check sum of 8 bits is compared.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        return self._call(self._case(x, out, counts), stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        *,
        out: Any = None,
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
            self._case(x, out, counts), stream, channel, algorithm, blocks, threads
        )

    def _case(self, x: Any, out: Any, counts: Any) -> Case:
        backend, world_size = self._context.backend, self._context.world_size
        view = backend.view(x, "x", writable=False)
        if counts is not None:
            return self._of_parts(x, view, out, parts.counts_of("counts", counts, world_size))
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

    def _of_parts(self, x: Any, view: ArrayView, out: Any, counts: tuple[int, ...]) -> Case:
        backend, rank = self._context.backend, self._context.rank
        parts.check_own(counts, rank, "x", view)
        own_offset = sum(counts[:rank]) * view.dtype.itemsize
        result = out
        if out is None:
            result = backend.like(x, view, parts.shape_of(x, view, counts, counts))
        out_view = backend.view(result, "out", writable=True)
        if out is not None:
            arrays.check_result(view, out_view, sum(counts), own_offset)
        own, longest = counts[rank], max(counts)
        made = parts.moved(view, [own] * len(counts), counts, longest=longest, repeats=True)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=out_view.nbytes,
            count=made.longest,
            fields={},
            what=f"counts {list(counts)}",
            is_given=out is not None,
            own_offset=own_offset,
            parts=made,
        )
