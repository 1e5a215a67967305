"""reduce: the root gets the reduction of all ranks' arrays."""

from typing import Any

from ..base import arguments, arrays
from ..plan.ops import Op, check_op
from .collective import ArrayT, Case, Collective
from .prepared import Empty, Prepared


class Reduce(Collective):
    """The root gets the element-wise reduction of all ranks' arrays."""

    _NAME, _OPTIONS = "reduce", (("root", 0), ("op", "sum"))

    def __call__(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        out: ArrayT | None = None,
        op: Op = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> ArrayT | None:
        """The root's `out` gets the element-wise reduction of all ranks' `x`.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of a type that all_reduce takes.
                The same size and type on every rank. Only the root's x is written, if the call is
                in place.
            root: The rank that gets the result.
            out: Array for the result, of the same size and type. When None, x: the call is in
                place. The other ranks may pass an out, too. It is checked, but not written.
            op: As in all_reduce.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            On the root `out`, or x, with the same bits as all_reduce's result. None on the other
            ranks.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        result: ArrayT | None = self._call(self._case(x, root, out, op), stream, channel, algorithm)
        return result

    def prepare(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        out: ArrayT | None = None,
        op: Op = "sum",
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
        case = self._case(x, root, out, op)
        return self._prepare(case, stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, root: Any, out: Any, op: Op) -> Case:
        backend = self._context.backend
        root = arguments.between("root", root, 0, self._context.world_size - 1)
        is_root = self._context.rank == root
        view = backend.view(x, "x", writable=is_root and out is None)
        check_op(op, view.dtype)
        out_view = view
        if out is not None:
            out_view = backend.view(out, "out", writable=is_root)
            arrays.check_result(view, out_view, view.count, 0)
        result = x if out is None else out
        return Case(
            view,
            out_view,
            result if is_root else None,
            x,
            nbytes=view.nbytes,
            count=view.count,
            fields={"dtype": view.dtype.name, "op": op, "peer": root},
            options=(root, op),
            what=f"{op}, root {root}",
            is_given=out is not None,
            has_result=is_root,
        )
