"""What the collectives have in common: a call is checked, planned, run, and taught to C.

C (kccl._fastcall) runs calls that it knows without a Python frame. It passes an unknown call to the
collective's file in this folder, which checks the arguments. `_call` here plans the call, runs it,
and teaches it to C.
"""

import weakref
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from itertools import product
from typing import Any, Self, TypeVar

from ..base import arguments
from ..base.abi import fastcall, moved_type
from ..base.arrays import ArrayView
from ..plan.choice import Plan
from . import scaled
from .context import Context
from .front import AnsweredByC
from .parts import Parts
from .prepared import Empty, Prepared, address_of, prepared
from .written import NOTHING, Written

# Number of calls that a collective keeps. When there are more, all are dropped and planned again.
KNOWN_CALLS = 1024

ArrayT = TypeVar("ArrayT")
"""Type of a caller's array, of any library."""


@dataclass(slots=True)
class Case:
    """One call whose arguments have been checked.

    Attributes:
        x, out: Views of the memory that the call reads and writes. In place they are the same.
        result: The object that the call returns; None if this rank has no result.
        array: The caller's x.
        nbytes: Size of the message as nccl-tests counts it.
        count: The value for KcclCall.count.
        fields: More arguments for Backend.call().
        options: Values of the collective's options, as (op,) or (root, op).
        what: The options in words, which the ranks compare under KCCL_CHECK=1.
        is_given: True if the caller has given `out`.
        has_result: False if this rank has no result: `result` is None, and `out` is not written.
        lacks_x: True if the caller's x is None, because this rank needs none. Then `x` is `out`.
        own_offset: Offset in bytes of this rank's chunk in the larger of x and out.
        parts: The parts of the call, if the caller gave counts; else None.
    """

    x: ArrayView
    out: ArrayView
    result: Any
    array: Any
    nbytes: int
    count: int
    fields: dict[str, Any]
    options: tuple[Any, ...] = ()
    what: str = ""
    is_given: bool = False
    has_result: bool = True
    lacks_x: bool = False
    own_offset: int = 0
    parts: Parts | None = None


class Collective(AnsweredByC, fastcall.Dispatcher):
    """One collective of one communicator. A subclass writes the call as its `__call__`."""

    # The collective's options, such as ("op", "sum"): keywords with their defaults. C tells known
    # calls apart by the values of these. There are at most two, and only the first may be
    # positional.
    _OPTIONS: tuple[tuple[str, Any], ...] = ()

    def __init__(self, context: Context) -> None:
        first, second = (*(name for name, _ in self._OPTIONS), "", "")[:2]
        option = signature(self._slow).parameters.get(first)
        is_positional = option is not None and option.kind is Parameter.POSITIONAL_OR_KEYWORD
        # C gets a weak reference to this object. A bound method would make a reference cycle, which
        # would keep the communicator's memory until the cyclic garbage collector runs.
        slow = partial(type(self)._slow, weakref.proxy(self))
        super().__init__(slow, (first, second), is_positional)
        self._context = context
        self._ops: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """Returns a communicator's collective of this kind."""
        return cls(context)

    def _call(self, case: Case, stream: Any, channel: Any, algorithm: str) -> Any:
        """Runs a call and returns its result. Plans it if it is the first of its kind."""
        context = self._context
        channel = self._channel(channel)
        stream = context.backend.stream(stream, case.x)
        plan = self._plan(case, algorithm)
        if case.count == 0:
            context.check_usable()
            self._check_agreement(case, plan, channel)
            return case.result
        key = (case.x.dtype, case.count, case.options, channel, plan.name, case.parts)
        known = self._ops.get(key)
        if known is None:
            if len(self._ops) >= KNOWN_CALLS:
                self._ops.clear()
            handle = self._make(case, plan, channel)
            known = handle, fastcall.Op(address_of(handle), None, context.raise_failure)
            self._ops[key] = known
        handle, op = known

        def fill() -> None:
            handle.call.input = case.x.address
            handle.call.output = case.out.address
            context.backend.set_stream(handle, stream)
            self._check_agreement(case, plan, channel)

        op.after(fill)
        if channel == 0 and not algorithm and case.parts is None:
            self._learn(case, handle)
        return case.result

    def _prepare(
        self,
        case: Case,
        stream: Any,
        channel: Any,
        algorithm: str,
        blocks: Any = 0,
        threads: Any = 0,
    ) -> Prepared | Empty:
        """Plans a call. Calling the returned object runs it."""
        context = self._context
        channel = self._channel(channel)
        context.backend.stream(stream, case.x)  # checks the argument
        context.check_usable()
        plan = self._plan(case, algorithm)
        if blocks or threads:
            context.backend.check_shape(blocks, threads)
            plan = replace(plan, blocks=blocks, threads=threads)
        signature = self._signature(case, plan, channel)
        if case.count == 0:
            return Empty(context, plan, signature, case.result)
        handle = self._make(case, plan, channel)
        handle.call.input = case.x.address
        handle.call.output = case.out.address
        arrays = [("out" if case.lacks_x else "x", case.array, case.x)]
        if case.result is not None and case.result is not case.array:
            arrays.append(("out", case.result, case.out))
        written = self._written(case)
        return prepared(
            context, signature, plan, handle, case.result, arrays, stream, written=written
        )

    def _plan(self, case: Case, algorithm: str) -> Plan:
        dtype, nbytes = scaled.summed(case)
        call = self._NAME, nbytes, dtype, algorithm
        if case.parts is None:
            return self._context.plan(*call)
        return self._context.plan.of_parts(case.parts.kernel, *call)

    def _channel(self, channel: Any) -> int:
        return arguments.between("channel", channel, 0, self._context.num_channels - 1)

    def _make(self, case: Case, plan: Plan, channel: int) -> Any:
        backend = self._context.backend
        if scaled.is_scaled(case):
            return scaled.make(backend, case, plan, channel)
        fields = case.fields if case.parts is None else case.fields | case.parts.fields()
        moved = None
        if "op" not in fields and self._context.compares_types:
            moved = moved_type(case.x.dtype.name)
        return plan.handle(backend, moved=moved, count=case.count, channel=channel, **fields)

    def _signature(self, case: Case, plan: Plan, channel: int) -> str:
        # This text describes the call and must be the same on all ranks. Without x it has the size
        # that x would have. With parts it has no size, because that differs between ranks; `what`
        # has the counts if all ranks know them.
        nbytes = case.nbytes if case.lacks_x else case.x.nbytes
        size = "" if case.parts else f"{nbytes} bytes, "
        what = f"{self._NAME}, {size}{case.x.dtype.name}, {case.what}"
        shape = f" by {plan.blocks} blocks of {plan.threads}" if plan.blocks else ""
        return f"{what.removesuffix(', ')}, channel {channel}, {plan.name}{shape}"

    def _check_agreement(self, case: Case, plan: Plan, channel: int) -> None:
        if self._context.checks:
            signature = self._signature(case, plan, channel)
            self._context.check_agreement(signature, self._written(case))

    def _written(self, case: Case) -> Written:
        """Returns the arrays that no other rank may give to the same call."""
        return NOTHING

    def _learn(self, case: Case, handle: Any) -> None:
        """Teaches C this call, for arrays of these sizes and types and these options."""
        is_allocated = case.has_result and not case.is_given and case.result is not case.array
        if is_allocated or self._context.checks:
            return
        if not (case.x.is_direct and case.out.is_direct):
            return
        if case.x.exchange_type is not case.out.exchange_type:
            return
        # A caller may give an option its default value, or leave it out, for which C takes an
        # Ellipsis. C learns both.
        ways = [
            (value, ...) if value == default else (value,)
            for value, (_, default) in zip(case.options, self._OPTIONS, strict=True)
        ]
        for given in product(*ways):
            first, second = (*given, ..., ...)[:2]
            self.learn(
                case.array.dtype,
                case.x.exchange_type,
                case.x.exchange_device,
                case.x.nbytes,
                (first, second),
                case.out.nbytes if case.is_given else 0,
                case.own_offset,
                case.has_result,
                case.lacks_x,
                address_of(handle),
                handle,
                self._context.raise_failure,
            )
