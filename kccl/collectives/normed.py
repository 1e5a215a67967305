"""The common part of collectives that normalise a sum. A call is one kernel, or a sum and a norm
that csrc/host/normed.cpp runs one after the other.
"""

from typing import Any

from ..base import arguments, dtypes
from ..base.abi import fastcall, ffi, lib
from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from .collective import KNOWN_CALLS, Collective
from .norm import NormCase
from .prepared import Empty, Prepared, address_of, prepared


class Normed(Collective):
    """A collective that normalises a sum. Python makes each call; C repeats prepared calls only."""

    _SUM: str  # the name of the collective that sums

    def _call_normed(self, case: NormCase, stream: Any, channel: Any, algorithm: str) -> Any:
        """Runs a call and returns its result. Plans it if it is the first of its kind."""
        context = self._context
        channel = self._channel(channel)
        on = context.backend.stream(stream, case.x, case.inputs())
        plan = self._plan_of(case, algorithm)
        signature = self._words(case, plan, channel)
        if case.x.count == 0:
            context.check_usable()
            context.check_agreement(signature)
            return case.result
        known = self._ops.get((signature,))
        if known is None:
            if len(self._ops) >= KNOWN_CALLS:
                self._ops.clear()
            made = self._made(case, plan, channel)
            op = fastcall.Op(address_of(made[0]), None, context.raise_failure)
            known = self._ops[(signature,)] = made, op
        (handle, norm), op = known

        def fill() -> None:
            _fill(case, handle, norm)
            context.backend.set_stream(handle, on)
            context.check_agreement(signature, case.written())

        op.after(fill)
        return case.result

    def _prepare_normed(
        self, case: NormCase, stream: Any, channel: Any, algorithm: str
    ) -> Prepared | Empty:
        """Plans a call. Calling the returned object runs it."""
        context = self._context
        channel = self._channel(channel)
        # Checks the argument, and awaits the arrays: a later run has nothing else to wait for.
        context.backend.stream(stream, case.x, case.inputs())
        context.check_usable()
        plan = self._plan_of(case, algorithm)
        signature = self._words(case, plan, channel)
        if case.x.count == 0:
            return Empty(context, plan, signature, case.result)
        handle, norm = self._made(case, plan, channel)
        _fill(case, handle, norm)
        return prepared(
            *(context, signature, plan, handle, case.result, case.given, stream),
            written=case.written(),
        )

    def plan(self, nbytes: int, dtype: Dtype, width: int, algorithm: str = "") -> Plan:
        """Returns the plan of a call on an x of `nbytes` with rows of `width` elements.

        Raises:
            InvalidArgument: x has no whole rows, or the algorithm cannot run the call.
        """
        row_bytes = arguments.between("width", width, 1, 1 << 31) * dtype.itemsize
        if nbytes % row_bytes:
            raise InvalidArgument(
                f"nbytes is {nbytes}, must be a multiple of {row_bytes}: rows of {width} "
                f"{dtype.name}"
            )
        return self._planned(nbytes, dtype, row_bytes, algorithm)

    def _planned(self, nbytes: int, dtype: Dtype, row_bytes: int, algorithm: str) -> Plan:
        del row_bytes
        return self._context.plan(self._SUM, nbytes, dtype, algorithm)

    def _plan_of(self, case: NormCase, algorithm: str) -> Plan:
        x = case.x
        return self._planned(x.nbytes, x.dtype, case.width * x.dtype.itemsize, algorithm)

    def _words(self, case: NormCase, plan: Plan, channel: int) -> str:
        return f"{self._NAME}, {case.words()}, channel {channel}, {plan.name}"

    def _made(self, case: NormCase, plan: Plan, channel: int) -> tuple[Any, Any]:
        """Returns the handles of the call and of its norm. If one kernel makes both, they are the
        same.
        """
        backend = self._context.backend
        dtype, count = case.x.dtype, case.out.count
        if plan.name == self._NAME:
            one = backend.call(plan.name, dtype=dtype.name, channel=channel, **case.fields())
            return one, one
        total = plan.handle(backend, count=count, channel=channel, dtype=dtype.name, op="sum")
        norm = backend.call("rms_norm", dtype=dtype.name, **case.fields())
        made = ffi.new("KcclNormedOp *")
        made.sum, made.norm = total, norm
        if case.scale is not None:
            made.sums = backend.temporary(count * dtype.itemsize, channel)
        if backend.has_streams:
            made.op = ffi.cast("KcclGpuOp *", total)[0]
        else:
            made.op.op = total[0]
        made.op.op.kernel = lib.kccl_run_normed
        made.op.op.is_new = 0  # the ranks compare the call of the sum, not this one around it
        keep = made, total, norm
        handle = ffi.gc(ffi.addressof(made, "op", "op"), lambda _, keep=keep: None)
        return handle, norm


def _fill(case: NormCase, handle: Any, norm: Any) -> None:
    """Points a call at the caller's arrays."""
    handle.call.input = case.x.address
    handle.call.output = case.out.address
    for name, value in case.addresses().items():
        setattr(norm.call, name, value)


def plan_of(calls: Any, collective: str, nbytes: Any, dtype: Any, width: int) -> Plan:
    """Returns the plan of a call. `calls` is the communicator; see Communicator.plan() for the
    rest.

    Raises:
        InvalidArgument: There is no such collective, or it cannot make such a call.
    """
    nbytes = arguments.not_negative("nbytes", nbytes)
    kind = None if dtype is None else dtypes.of(dtype)
    arguments.whole_elements("nbytes", nbytes, kind)
    normed = getattr(calls, collective, None) if isinstance(collective, str) else None
    if isinstance(normed, Normed) and kind is not None:
        return normed.plan(nbytes, kind, width)
    plan: Plan = calls.context.plan(collective, nbytes, kind)
    return plan
