"""all_reduce: every rank gets the reduction of all ranks' arrays."""

from typing import Any

from ..base import arrays
from ..plan.ops import Op, check_op
from .collective import ArrayT, Case, Collective
from .prepared import Empty, Prepared
from .written import NOTHING, Written


class AllReduce(Collective):
    """Every rank gets the element-wise reduction of all ranks' arrays."""

    _NAME, _OPTIONS = "all_reduce", (("op", "sum"),)

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
        """Every rank's `out` gets the element-wise reduction of all ranks' `x`.

        Args:
            x: Array of any shape, of floats of 8 to 64 bits, integers of either sign, bool,
                complex64 or complex128. The same size and type on every rank. If x or out is not
                C-contiguous, the call copies it first, as its caller would, and copies back what it
                writes. Then x and out may overlap. On GPUs PyTorch and CuPy do that, on the stream
                of the call. C-contiguous arrays only are taken from other libraries on GPUs, by
                prepare(), prepared groups, isend(), irecv() and a group's recv().
            out: Array for the result, of the same size and type. When None, x: the call is in
                place. Then ranks that are threads may give the same x, but ranks in different
                processes must not give the same shared memory, or the sum may be wrong.
                On CPUs KCCL_CHECK=1 refuses that.
            op: "sum" and "prod" for all types; "min" and "max" for all but complex numbers; "avg"
                for floats and complex numbers; "band", "bor" and "bxor" for integers and bool.
                Integers wrap on overflow. For bool, "sum" is "or" and "prod" is "and". "avg"
                divides the sum by the number of ranks, and is infinite where the sum is.
                kccl.premul_sum(factor) multiplies this rank's elements by `factor`, then sums; each
                rank may give another factor.
            stream: On a GPU, the stream of the call: an integer, or an object that has
                __cuda_stream__. When None, the current stream of x's library. On the host None.
            channel: Channel number, below `comm.num_channels`. Calls on different channels are
                independent.
            algorithm: Name of the algorithm to use. When "", the plan chooses.

        Returns:
            `out`, or x. It has the same bits on every rank.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
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
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself. The object keeps the arrays
        alive. `blocks` and `threads` tune the launch on a GPU. Give both or neither; 0 lets the
        plan choose. A call has at most `blocks` blocks of `threads` threads each. Longer messages
        than these cover get more threads for each block. KCCL_STREAMS bounds both, so that calls of
        other streams find room; `op.shape` says what the call has.
        """
        return self._prepare(self._case(x, out, op), stream, channel, algorithm, blocks, threads)

    def _written(self, case: Case) -> Written:
        """See Collective. Returns x if the call is in place: if ranks in different processes gave
        the same memory, one might read x after another has stored its result there.
        """
        is_in_place = case.x.address == case.out.address
        return Written((("x", case.x),), threads_may_share=True) if is_in_place else NOTHING

    def _case(self, x: Any, out: Any, op: Op) -> Case:
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
            options=(op,),
            what=str(op),
            is_given=out is not None,
        )
