"""scan: every rank gets the reduction of its array and of those of the lower ranks."""

from typing import Any

from ..base import arrays
from ..base.errors import InvalidArgument
from ..plan.ops import Op, check_op
from .collective import ArrayT, Case, Collective
from .prepared import Empty, Prepared


class Scan(Collective):
    """Every rank gets the element-wise reduction of its array and of those of the lower ranks."""

    _NAME, _OPTIONS = "scan", (("op", "sum"), ("exclusive", False))

    def __call__(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        op: Op = "sum",
        exclusive: bool = False,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> ArrayT | None:
        """This rank's `out` gets the element-wise reduction of the `x` of ranks 0 to `rank`.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of a type that all_reduce takes.
                The same size and type on every rank.
            out: Array for the result, of the same size and type. When None, x: the call is in
                place.
            op: As in all_reduce. "avg" is the mean of those ranks' x.
            exclusive: If True, only ranks 0 to rank - 1 count, without this rank's own x. So rank 0
                has no result, and its arrays are not written. It must be the same on every rank.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            `out`, or x; None on rank 0 of an exclusive scan. The ranks' arrays are reduced in rank
            order, so the last rank's result of a scan that is not exclusive has the same bits as
            all_reduce's.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        result: ArrayT | None = self._call(
            self._case(x, out, op, exclusive), stream, channel, algorithm
        )
        return result

    def prepare(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        op: Op = "sum",
        exclusive: bool = False,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
        blocks: int = 0,
        threads: int = 0,
    ) -> Prepared | Empty:
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself and of all_reduce.prepare. The
        object keeps the arrays alive.
        """
        case = self._case(x, out, op, exclusive)
        return self._prepare(case, stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, out: Any, op: Op, exclusive: Any) -> Case:
        if not isinstance(exclusive, bool):
            raise InvalidArgument(f"exclusive is {exclusive!r}, must be True or False")
        backend = self._context.backend
        has_result = not exclusive or self._context.rank > 0
        view = backend.view(x, "x", writable=has_result and out is None)
        check_op(op, view.dtype)
        out_view = view
        if out is not None:
            out_view = backend.view(out, "out", writable=has_result)
            arrays.check_result(view, out_view, view.count, 0)
        result = x if out is None else out
        return Case(
            view,
            out_view,
            result if has_result else None,
            x,
            nbytes=view.nbytes,
            count=view.count,
            fields={"dtype": view.dtype.name, "op": op, "peer": int(exclusive)},
            options=(op, exclusive),
            what=f"{op}, exclusive" if exclusive else str(op),
            is_given=out is not None,
            has_result=has_result,
        )
