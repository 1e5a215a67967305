"""The common part of collectives that normalise a sum. A call is one kernel, or a sum and a norm
that csrc/host/normed.cpp runs one after the other.
"""

from dataclasses import replace
from typing import Any

from ..base import arguments, dtypes
from ..base.abi import fastcall, ffi, lib
from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from ..plan.lookup import check_collective
from .collective import KNOWN_CALLS, Collective
from .context import Context
from .norm import MOST_WIDTH, NormCase, normalised
from .prepared import Empty, Prepared, address_of, prepared


class Normed(Collective):
    """A collective that normalises a sum. Python makes each call; C repeats prepared calls only."""

    _SUM: str  # the name of the collective that sums

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Size, element type, width and the caller's algorithm -> the plan of such a call.
        self._plans: dict[tuple[int, Dtype, int, str], Plan] = {}

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

    def algorithms(self) -> list[str]:
        """Returns the names of the call's algorithms: those of the sum, before a norm."""
        return self._context.plan.algorithms(self._SUM)

    def plan(self, nbytes: int, dtype: Dtype | None, width: int) -> Plan:
        """Returns the plan of a call on an x of `nbytes` with rows of `width` elements.

        Raises:
            InvalidArgument: Rows of this type are not normalised, or x has no whole rows.
        """
        dtype = normalised("dtype", dtype)
        row_bytes = arguments.between("width", width, 1, MOST_WIDTH) * dtype.itemsize
        if nbytes % row_bytes:
            raise InvalidArgument(
                f"nbytes is {nbytes}, must be a multiple of {row_bytes}: rows of {width} "
                f"{dtype.name}"
            )
        return self._planned(nbytes, dtype, row_bytes, "")

    def _planned(self, nbytes: int, dtype: Dtype, row_bytes: int, algorithm: str) -> Plan:
        """Plans a call. Raises InvalidArgument if the algorithm is unknown or cannot run it."""
        del row_bytes
        known = self.algorithms()
        if algorithm and algorithm not in known:
            raise InvalidArgument(
                f"algorithm is {algorithm!r}, must be an algorithm of {self._NAME}: "
                f"{', '.join(known)}"
            )
        plan = self._context.plan(self._SUM, nbytes, dtype, algorithm)
        return replace(plan, request=replace(plan.request, collective=self._NAME))

    def _plan_of(self, case: NormCase, algorithm: str) -> Plan:
        x = case.x
        key = x.nbytes, x.dtype, case.width, algorithm
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KNOWN_CALLS:
                self._plans.clear()
            plan = self._planned(x.nbytes, x.dtype, case.width * x.dtype.itemsize, algorithm)
            self._plans[key] = plan
        return plan

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
        InvalidArgument: There is no such collective, or it cannot make such a call, or `width` is
            given and its calls have no rows.
    """
    nbytes = arguments.not_negative("nbytes", nbytes)
    kind = None if dtype is None else dtypes.of(dtype)
    arguments.whole_elements("nbytes", nbytes, kind)
    normed = _normed(calls, collective)
    if normed is not None:
        return normed.plan(nbytes, kind, width)
    plan: Plan = calls.context.plan(collective, nbytes, kind)
    if width != 0:
        raise InvalidArgument(f"width is {width!r}, must be 0: {collective} has no rows")
    return plan


def algorithms_of(calls: Any, collective: str) -> list[str]:
    """Returns the names of a collective's algorithms. `calls` is the communicator.

    Raises:
        InvalidArgument: There is no such collective.
    """
    normed = _normed(calls, collective)
    if normed is not None:
        return normed.algorithms()
    names: list[str] = calls.context.plan.algorithms(collective)
    return names


def _normed(calls: Any, collective: str) -> Normed | None:
    """Returns a communicator's collective if it normalises a sum; else None. Raises InvalidArgument
    if there is no such collective.
    """
    check_collective(collective, (each._NAME for each in Normed.__subclasses__()))
    found = getattr(calls, collective, None) if isinstance(collective, str) else None
    return found if isinstance(found, Normed) else None
