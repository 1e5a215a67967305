"""scatter: every rank gets its chunk of the root's array."""

from collections.abc import Sequence
from typing import Any

from ..base import arguments, arrays
from ..base.errors import InvalidArgument
from . import parts
from .all_to_all import check_divisible
from .collective import Case, Collective
from .prepared import Empty, Prepared


class Scatter(Collective):
    """Every rank gets its chunk of the root's array."""

    _NAME, _OPTIONS = "scatter", (("root", 0),)

    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """This rank's `out` gets chunk `rank` of the root's `x`, bit by bit.

        Args:
            x: On the root, an array of any shape, strided ones as in all_reduce, of any type
                without Python objects. The size must be divisible by world_size, unless counts are
                given. Chunk p is the p-th of world_size equal parts. The other ranks pass None, and
                then must give out. Or they pass an array of the same size and type, which is not
                read.
            root: The rank whose array is scattered.
            out: Array for the result, of x's type, with x.size / world_size elements. In place: the
                root's out may be its chunk of x. Otherwise x and out must not overlap. When None,
                an array is allocated, with the shape as in reduce_scatter.
            counts: Number of elements that each rank gets, as in MPI's Scatterv: integers of at
                least 0, the same on every rank. x has sum(counts) elements, in rank order, and out
                has counts[rank]. If all counts are whole rows of x, an allocated array keeps x's
                dimensions except the first; otherwise it has one dimension. When None, every rank
                gets x.size / world_size elements.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or the allocated array.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent. Or a rank's part has another
                length than the root's counts say. With more than 8 ranks only the longest counts
                are compared.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        return self._call(self._case(x, root, out, counts), stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        root: int = 0,
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
            self._case(x, root, out, counts), stream, channel, algorithm, blocks, threads
        )

    def _case(self, x: Any, root: Any, out: Any, counts: Any) -> Case:
        backend, world_size = self._context.backend, self._context.world_size
        root = arguments.between("root", root, 0, world_size - 1)
        if counts is not None:
            return self._of_parts(x, root, out, parts.counts_of("counts", counts, world_size))
        if x is None:
            return self._without_x(root, out)
        view = backend.view(x, "x", writable=False)
        check_divisible(view, world_size)
        count = view.count // world_size
        result = out
        if out is None:
            result = backend.like(x, view, arrays.shape_of_chunk(x, view, world_size))
        out_view = backend.view(result, "out", writable=True)
        own_offset = self._context.rank * out_view.nbytes
        if out is not None:
            arrays.check_result(view, out_view, count, own_offset)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=view.nbytes,
            count=out_view.nbytes,
            fields={"peer": root},
            options=(root,),
            what=f"root {root}",
            is_given=out is not None,
            own_offset=own_offset,
        )

    def _check_lacks_x(self, root: int, out: Any) -> None:
        if self._context.rank == root or out is None:
            needed = "the root's array" if self._context.rank == root else "given, or out"
            raise InvalidArgument(f"x is None on rank {self._context.rank}, must be {needed}")

    def _of_parts(self, x: Any, root: int, out: Any, counts: tuple[int, ...]) -> Case:
        backend, rank = self._context.backend, self._context.rank
        result = out
        if x is None:
            self._check_lacks_x(root, out)
            view = out_view = backend.view(out, "out", writable=True)
            parts.check_own(counts, rank, "out", view)
            own_offset = 0
        else:
            view = backend.view(x, "x", writable=False)
            parts.check_sum("counts", counts, "x", view)
            own_offset = sum(counts[:rank]) * view.dtype.itemsize
            if out is None:
                wanted = counts[rank : rank + 1]
                result = backend.like(x, view, parts.shape_of(x, view, counts, wanted))
            out_view = backend.view(result, "out", writable=True)
            if out is not None:
                arrays.check_result(view, out_view, counts[rank], own_offset)
        nothing = [0] * len(counts)
        receives = [counts[rank] if peer == root else 0 for peer in range(len(counts))]
        sends = counts if rank == root else nothing
        made = parts.moved(view, sends, receives, longest=max(counts))
        return Case(
            view,
            out_view,
            result,
            x if x is not None else out,
            nbytes=sum(counts) * view.dtype.itemsize,
            count=made.longest,
            fields={"peer": root},
            options=(root,),
            what=f"root {root}, counts {list(counts)}",
            is_given=out is not None,
            lacks_x=x is None,
            own_offset=own_offset,
            parts=made,
        )

    def _without_x(self, root: int, out: Any) -> Case:
        self._check_lacks_x(root, out)
        view = self._context.backend.view(out, "out", writable=True)
        return Case(
            view,
            view,
            out,
            out,
            nbytes=self._context.world_size * view.nbytes,
            count=view.nbytes,
            fields={"peer": root},
            options=(root,),
            what=f"root {root}",
            is_given=True,
            lacks_x=True,
        )
