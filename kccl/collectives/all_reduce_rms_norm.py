"""all_reduce_rms_norm: every rank gets the normalised rows of the sum of all ranks' arrays."""

from dataclasses import replace
from typing import Any

from ..base.abi import fastcall, ffi, lib
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from ..plan.spec import GPUS, Request
from .collective import KNOWN_CALLS, ArrayT, Collective
from .norm import NormCase, check
from .prepared import Empty, Prepared, address_of, prepared

_FUSED = "all_reduce_rms_norm"
# One kernel makes a call for each piece of a row, one after another. More of them in a block take
# longer than another kernel.
_MOST_PIECES, _PIECE_BYTES, _MOST_BLOCKS = 2, 8192, 128


class AllReduceRmsNorm(Collective):
    """Every rank gets the normalised rows of the sum of all ranks' arrays.

    Python makes each call; prepare() makes calls that C repeats alone.
    """

    _NAME = "all_reduce_rms_norm"

    def __call__(
        self,
        x: ArrayT,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        out: ArrayT | None = None,
        scale: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> ArrayT:
        """Sums x over the ranks, adds the residual, and normalises each row.

            hidden = sum over ranks of x + residual
            out = hidden / sqrt(mean(hidden * hidden) + eps) * weight

        The bits are those of all_reduce(x) followed by kccl.rms_norm(x, weight, eps,
        residual=residual). On a GPU small messages take one kernel, others two.

        Args:
            x: C-contiguous array [..., width] of float32, float16 or bfloat16. The same size and
                type on every rank.
            residual: Array of the size and type of x, which gets `hidden`, rounded to that type;
                None: there is none. The same on every rank, so that the results are.
            weight: Array [width] of the same type; the same on every rank.
            eps: Number that is not negative. It is rounded to float32.
            out: Array for the result, of the size and type of x; float8_e4m3fn where scale is
                given. When None, x: the call is in place.
            scale: Array of one float32. The result is divided by it, limited to 448 either way, and
                rounded to float8_e4m3fn once.
            stream, channel: As in all_reduce.
            algorithm: "all_reduce_rms_norm" for one kernel, or an algorithm of all_reduce for two.
                When "", the plan of all_reduce chooses: one kernel where that is one_shot.

        Returns:
            `out`, or x.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not come, or went.
        """
        context = self._context
        case = check(context.backend.view, x, residual, weight, eps, out, scale)
        channel = self._channel(channel)
        on = context.backend.stream(stream, case.x)
        plan = self._plan_of(case, algorithm)
        signature = self._words(case, plan, channel)
        result: ArrayT = case.result
        if case.x.count == 0:
            context.check_usable()
            context.check_agreement(signature)
            return result
        key = (signature, case.scale is None)
        known = self._ops.get(key)
        if known is None:
            if len(self._ops) >= KNOWN_CALLS:
                self._ops.clear()
            handle, norm = self._made(case, plan, channel)
            op = fastcall.Op(address_of(handle), None, context.raise_failure)
            known = self._ops[key] = (handle, norm), op
        (handle, norm), op = known

        def fill() -> None:
            _fill(case, handle, norm)
            context.backend.set_stream(handle, on)
            context.check_agreement(signature)

        op.after(fill)
        return result

    def prepare(
        self,
        x: ArrayT,
        residual: Any,
        weight: Any,
        eps: float,
        *,
        out: ArrayT | None = None,
        scale: Any = None,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Prepared | Empty:
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself. The object keeps the arrays
        alive.
        """
        context = self._context
        case = check(context.backend.view, x, residual, weight, eps, out, scale)
        channel = self._channel(channel)
        context.backend.stream(stream, case.x)  # checks the argument
        context.check_usable()
        plan = self._plan_of(case, algorithm)
        signature = self._words(case, plan, channel)
        if case.x.count == 0:
            return Empty(context, plan, signature, case.result)
        handle, norm = self._made(case, plan, channel)
        _fill(case, handle, norm)
        return prepared(context, signature, plan, handle, case.result, case.given, stream)

    def _words(self, case: NormCase, plan: Plan, channel: int) -> str:
        return f"{self._NAME}, {case.words()}, channel {channel}, {plan.name}"

    def _plan_of(self, case: NormCase, algorithm: str) -> Plan:
        why_not = self._why_not_fused(case)
        if algorithm == _FUSED:
            if why_not:
                raise InvalidArgument(f"algorithm {algorithm!r} cannot run this: {why_not}")
            context = self._context
            facts = context.world_size, context.backend.name, case.x.dtype
            return Plan(_FUSED, Request(_FUSED, case.x.nbytes, *facts), "asked for by name", ())
        plan = self._context.plan("all_reduce", case.x.nbytes, case.x.dtype, algorithm)
        blocks = min(case.x.count // case.width, _MOST_BLOCKS) or 1
        pieces = -(-case.width * case.x.dtype.itemsize // _PIECE_BYTES)
        rows_of_a_block = -(-case.x.count // (case.width * blocks))
        is_small = plan.name.startswith("all_reduce_one_shot")
        if why_not or algorithm or not is_small or rows_of_a_block * pieces > _MOST_PIECES:
            return plan
        others = ((plan.name, "it is another kernel before the norm"), *plan.rejected)
        reason = f"all_reduce of this size is {plan.name}"
        return replace(plan, name=_FUSED, reason=reason, rejected=others, blocks=0, threads=0)

    def _why_not_fused(self, case: NormCase) -> str:
        """Returns why one kernel cannot make the call; "" if it can."""
        if self._context.backend.name not in GPUS:
            return f"for {' and '.join(GPUS)} only"
        if case.scale is not None and case.residual is None:
            return "the sum needs memory of its type, and there is no residual"
        return ""

    def _made(self, case: NormCase, plan: Plan, channel: int) -> tuple[Any, Any]:
        """Returns the call, and that of its kernel that normalises: the same, or a part of it."""
        backend = self._context.backend
        dtype = case.x.dtype.name
        if plan.name == _FUSED:
            one = backend.call(_FUSED, dtype=dtype, channel=channel, **case.fields())
            return one, one
        total = plan.handle(backend, count=case.x.count, channel=channel, dtype=dtype, op="sum")
        norm = backend.call("rms_norm", dtype=dtype, **case.fields())
        made = ffi.new("KcclNormedOp *")
        made.sum, made.norm = total, norm
        if case.scale is not None:
            made.sums = backend.temporary(case.x.nbytes, channel)
        if backend.has_streams:
            made.op = ffi.cast("KcclGpuOp *", total)[0]
        else:
            made.op.op = total[0]
        made.op.op.kernel = lib.kccl_run_normed
        made.op.op.is_new = 0  # the collective is compared, not the call around it
        keep = made, total, norm
        handle = ffi.gc(ffi.addressof(made, "op", "op"), lambda _, keep=keep: None)
        return handle, norm


def _fill(case: NormCase, handle: Any, norm: Any) -> None:
    """Points a call at the caller's arrays."""
    handle.call.input = case.x.address
    handle.call.output = case.out.address
    for name, value in case.addresses().items():
        setattr(norm.call, name, value)
