"""all_to_all: every rank gets its chunk of each rank's array."""

from collections.abc import Sequence
from typing import Any

from ..base import arrays
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from . import parts
from .collective import Case, Collective
from .prepared import Empty, Prepared


class AllToAll(Collective):
    """Every rank gets its chunk of each rank's array, in rank order."""

    _NAME = "all_to_all"

    def __call__(
        self,
        x: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Chunk p of this rank's `out` gets chunk `rank` of rank p's `x`, bit by bit.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of any type without Python
                objects. The same size and type on every rank, and the size must be divisible by
                world_size, unless counts are given. Chunk p is the p-th of world_size equal parts.
            out: Array for the result, of x's size and type. In place: out may be x. Otherwise they
                must not overlap. When None, an array of x's shape is allocated as in all_gather.
            send_counts, recv_counts: Numbers of elements that this rank sends to each rank and
                receives from each, as in MPI's Alltoallv. Give both or neither; each number is at
                least 0. Rank a's send_counts[b] must equal rank b's recv_counts[a]. x has
                sum(send_counts) elements and out sum(recv_counts), in rank order. In place the two
                must be equal. If all counts are whole rows of x, an allocated array keeps x's
                dimensions except the first; otherwise it has one dimension. With more than 8 ranks,
                and between nodes, each part is a message to its rank, and types are not compared.
                So are the chunks of x without counts from 64 KiB on, with more than 8 ranks of one
                node.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or the allocated array.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent. Or a rank sends another number
                of elements than its receiver's recv_counts says; then all ranks raise it.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        return self._call(self._case(x, out, send_counts, recv_counts), stream, channel, algorithm)

    def prepare(
        self,
        x: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
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
        case = self._case(x, out, send_counts, recv_counts)
        return self._prepare(case, stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, out: Any, send_counts: Any, recv_counts: Any) -> Case:
        if send_counts is not None or recv_counts is not None:
            return self._of_parts(x, out, send_counts, recv_counts)
        backend, world_size = self._context.backend, self._context.world_size
        view = backend.view(x, "x", writable=False)
        check_divisible(view, world_size)
        result = backend.like(x, view, arrays.shape(x, view)) if out is None else out
        out_view = backend.view(result, "out", writable=True)
        if out is not None:
            arrays.check_result(view, out_view, view.count, 0)
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=view.nbytes,
            count=view.nbytes // world_size,
            fields={},
            is_given=out is not None,
        )

    def _of_parts(self, x: Any, out: Any, send_counts: Any, recv_counts: Any) -> Case:
        backend, world_size = self._context.backend, self._context.world_size
        for name, value in (("send_counts", send_counts), ("recv_counts", recv_counts)):
            if value is None:
                raise InvalidArgument(f"{name} is None, must be given with the other counts")
        sends = parts.counts_of("send_counts", send_counts, world_size)
        receives = parts.counts_of("recv_counts", recv_counts, world_size)
        view = backend.view(x, "x", writable=False)
        parts.check_sum("send_counts", sends, "x", view)
        rank = self._context.rank
        if sends[rank] != receives[rank]:
            raise InvalidArgument(
                f"send_counts[{rank}] is {sends[rank]} and recv_counts[{rank}] is {receives[rank]} "
                f"on rank {rank}: must be equal"
            )
        result = out
        if out is None:
            result = backend.like(x, view, parts.shape_of(x, view, sends, receives))
        out_view = backend.view(result, "out", writable=True)
        if out is not None:
            arrays.check_result(view, out_view, sum(receives), 0)
            if view.nbytes and out_view.address == view.address and sends != receives:
                raise InvalidArgument(
                    "out is the memory of x, and send_counts and recv_counts differ: must be equal "
                    "in place"
                )
        return Case(
            view,
            out_view,
            result,
            x,
            nbytes=max(view.nbytes, out_view.nbytes),
            count=(made := parts.moved(view, sends, receives)).longest,
            fields={},
            what="counts of each rank's own",
            is_given=out is not None,
            parts=made,
        )


def check_divisible(x: ArrayView, world_size: int) -> None:
    """Checks that an array can be divided into equal chunks, one for each rank.

    Raises:
        InvalidArgument: It cannot.
    """
    if x.count % world_size:
        raise InvalidArgument(
            f"x has {x.count} elements, must be divisible by world_size, {world_size}"
        )
