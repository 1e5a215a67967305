"""gather: the root gets all ranks' arrays, one after another."""

from collections.abc import Sequence
from typing import Any

from ..base import arguments, arrays
from ..base.arrays import ArrayView
from . import parts
from .collective import Case, Collective
from .prepared import Empty, Prepared


class Gather(Collective):
    """The root gets all ranks' arrays, in rank order."""

    _NAME, _OPTIONS = "gather", (("root", 0),)

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
        """The root's `out` gets all ranks' `x`, in rank order and bit by bit.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of any type without Python
                objects. The same size and type on every rank, unless counts are given.
            root: The rank that gets the result.
            out: Array for the result, of x's type, with world_size * x.size elements. In place: the
                root's x may be its chunk of out, the x.size elements from root * x.size on.
                Otherwise x and out must not overlap. When None, an array of shape (world_size,
                *x.shape) is allocated as in all_gather. The other ranks may pass an out, too. It is
                checked, but not written.
            counts: Number of elements of each rank, the same on every rank. See all_gather. When
                None, every rank has x.size elements.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or the allocated array, on the root. None on the other ranks.

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
        is_root = self._context.rank == root
        view = backend.view(x, "x", writable=False)
        if counts is not None:
            checked = parts.counts_of("counts", counts, world_size)
            return self._of_parts(x, view, root, out, checked)
        own_offset = self._context.rank * view.nbytes
        result = out
        if out is None and is_root:
            result = backend.like(x, view, (world_size, *arrays.shape(x, view)))
        out_view = view if result is None else backend.view(result, "out", writable=is_root)
        if out is not None:
            arrays.check_result(view, out_view, world_size * view.count, own_offset)
        return Case(
            view,
            out_view,
            result if is_root else None,
            x,
            nbytes=world_size * view.nbytes,
            count=view.nbytes,
            fields={"peer": root},
            options=(root,),
            what=f"root {root}",
            is_given=out is not None,
            own_offset=own_offset,
            has_result=is_root,
        )

    def _of_parts(
        self, x: Any, view: ArrayView, root: int, out: Any, counts: tuple[int, ...]
    ) -> Case:
        backend, rank = self._context.backend, self._context.rank
        is_root = rank == root
        parts.check_own(counts, rank, "x", view)
        own_offset = sum(counts[:rank]) * view.dtype.itemsize
        result = out
        if out is None and is_root:
            result = backend.like(x, view, parts.shape_of(x, view, counts, counts))
        out_view = view if result is None else backend.view(result, "out", writable=is_root)
        if out is not None:
            arrays.check_result(view, out_view, sum(counts), own_offset)
        nothing = [0] * len(counts)
        sends = [counts[rank] if peer == root else 0 for peer in range(len(counts))]
        receives = counts if is_root else nothing
        made = parts.moved(view, sends, receives, longest=max(counts))
        return Case(
            view,
            out_view,
            result if is_root else None,
            x,
            nbytes=sum(counts) * view.dtype.itemsize,
            count=made.longest,
            fields={"peer": root},
            options=(root,),
            what=f"root {root}, counts {list(counts)}",
            is_given=out is not None,
            own_offset=own_offset,
            has_result=is_root,
            parts=made,
        )
