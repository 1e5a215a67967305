"""What the collectives have in common: a call is checked, planned, run, and taught to C.

C (kccl._fastcall) runs calls that it knows without a Python frame. It passes an unknown call to the
collective's file in this folder, which checks the arguments. `_call` here plans the call, runs it,
and teaches it to C.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeVar

from ..base import arguments
from ..base.abi import fastcall
from ..base.arrays import ArrayView
from ..plan.choice import Plan
from .context import Context
from .front import AnsweredByC
from .prepared import Empty, Prepared, address_of, prepared

# Number of calls that a collective keeps. When there are more, all are dropped and planned again.
_KNOWN_CALLS = 1024

ArrayT = TypeVar("ArrayT")
"""Type of a caller's array, of any library."""


@dataclass(slots=True)
class Case:
    """One call whose arguments have been checked.

    Attributes:
        x, out: Views of the memory that the call reads and writes. In place they are the same.
        result: The object that the call returns.
        array: The caller's x.
        nbytes: Size of the message as nccl-tests counts it.
        count: KcclCall.count.
        fields: More arguments for Backend.call().
        option: Value of the collective's option, as op or root.
        what: The option in words, for KCCL_CHECK=1.
        is_given: True if the caller has given `out`.
        own_offset: Offset in bytes of this rank's chunk in the larger of x and out.
    """

    x: ArrayView
    out: ArrayView
    result: Any
    array: Any
    nbytes: int
    count: int
    fields: Mapping[str, Any]
    option: Any = None
    what: str = ""
    is_given: bool = False
    own_offset: int = 0


class Collective(AnsweredByC, fastcall.Dispatcher):
    """One collective of one communicator. A subclass writes the call as its `__call__`."""

    # The keyword whose value is part of what C knows of a call, and its default.
    _OPTION = ""
    _DEFAULT: Any = None

    def __init__(self, context: Context) -> None:
        option = signature(self._slow).parameters.get(self._OPTION)
        is_positional = option is not None and option.kind is Parameter.POSITIONAL_OR_KEYWORD
        # A bound method would refer to this object, which C would refer to: a cycle, which keeps
        # the communicator's memory until the cyclic collector runs.
        slow = partial(type(self)._slow, weakref.proxy(self))
        super().__init__(slow, self._OPTION, is_positional)
        self._context = context
        self._ops: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def _call(self, case: Case, stream: Any, channel: Any, algorithm: str) -> Any:
        """Runs a call and returns its result. Plans it if it is the first of its kind."""
        context = self._context
        channel = self._channel(channel)
        stream = context.backend.stream(stream, case.x)
        plan = context.plan(self._NAME, case.nbytes, case.x.dtype, algorithm)
        if case.count == 0:
            context.check_usable()
            self._check_agreement(case, plan, channel)
            return case.result
        key = (case.x.dtype, case.count, case.option, channel, plan.name)
        known = self._ops.get(key)
        if known is None:
            if len(self._ops) >= _KNOWN_CALLS:
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
        if channel == 0 and not algorithm:
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
        plan = context.plan(self._NAME, case.nbytes, case.x.dtype, algorithm)
        if blocks or threads:
            context.backend.check_shape(blocks, threads)
            plan = replace(plan, blocks=blocks, threads=threads)
        signature = self._signature(case, plan, channel)
        if case.count == 0:
            return Empty(context, plan, signature, case.result)
        handle = self._make(case, plan, channel)
        handle.call.input = case.x.address
        handle.call.output = case.out.address
        keep = (case.x, case.out, case.array)
        return prepared(context, signature, plan, handle, case.result, keep, stream)

    def _channel(self, channel: Any) -> int:
        return arguments.between("channel", channel, 0, self._context.num_channels - 1)

    def _make(self, case: Case, plan: Plan, channel: int) -> Any:
        backend = self._context.backend
        shape = plan.blocks, plan.threads
        return backend.call(plan.name, shape, count=case.count, channel=channel, **case.fields)

    def _signature(self, case: Case, plan: Plan, channel: int) -> str:
        what = f"{self._NAME}, {case.x.nbytes} bytes, {case.x.dtype.name}, {case.what}"
        shape = f" by {plan.blocks} blocks of {plan.threads}" if plan.blocks else ""
        return f"{what.removesuffix(', ')}, channel {channel}, {plan.name}{shape}"

    def _check_agreement(self, case: Case, plan: Plan, channel: int) -> None:
        if self._context.checks:
            self._context.check_agreement(self._signature(case, plan, channel))

    def _learn(self, case: Case, handle: Any) -> None:
        """Teaches C this call, for arrays of these sizes and types and this value of the option."""
        is_in_place = case.result is case.array
        if not (is_in_place or case.is_given) or self._context.checks:
            return
        if not (case.x.is_direct and case.out.is_direct):
            return
        if case.x.exchange_type is not case.out.exchange_type:
            return
        is_default = case.option == self._DEFAULT
        for given in (case.option, ...) if is_default else (case.option,):
            self.learn(
                case.array.dtype,
                case.x.exchange_type,
                case.x.exchange_device,
                case.x.nbytes,
                given,
                case.out.nbytes if case.is_given else 0,
                case.own_offset,
                address_of(handle),
                handle,
                self._context.raise_failure,
            )
