"""What the collectives have in common, and the objects that their `.prepare` returns.

C (kccl._fastcall) runs prepared calls, and calls that it knows, without a Python frame. It passes
an unknown call to the collective's file in kccl/collectives, which checks the arguments. `_call`
here plans the call, runs it, and teaches it to C.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..base import arguments
from ..base.abi import fastcall, ffi
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from .context import Context
from .front import AnsweredByC, call_is_not_copied

if TYPE_CHECKING:
    import numpy as np


# Number of calls that a collective keeps. When there are more, all are dropped and planned again.
_KNOWN_CALLS = 1024
# On a GPU two events clock this many calls together, because an event costs as much as a call.
_CALLS_PER_EVENT = 100


def address_of(handle: Any) -> int:
    """The address of a call's struct, as C takes it."""
    return int(ffi.cast("uintptr_t", handle))


class Prepared(fastcall.Op):
    """A call that is planned once. `op()` runs it and returns the result array.

    Attributes:
        plan: How the call runs, and why.
    """

    __reduce_ex__ = call_is_not_copied

    def __init__(
        self,
        context: Context,
        plan: Plan,
        handle: Any,
        result: Any,
        keep: Any,
        stream: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(address_of(handle), result, context.raise_failure, stream)
        self.plan = plan
        self._context = context
        self._handle = handle
        self._keep = keep

    def end(self, refuse: Callable[[], None]) -> None:
        """Makes every later run raise what `refuse` raises."""

        def stream() -> int:
            refuse()
            return 0

        # C asks for the stream before each run.
        fastcall.Op.__init__(
            self, address_of(self._handle), None, self._context.raise_failure, stream
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """C calls this when `op()` is given arguments."""
        raise TypeError("a prepared call takes no arguments: prepare() has taken them")

    def time(self, iterations: int, *, warmup: int = 0) -> "np.ndarray[Any, Any]":
        """Runs the call back to back, clocked in C. Collective.

        Args:
            iterations: Number of clocked calls.
            warmup: Number of calls before them.

        Returns:
            float64 [iterations]: for each call the microseconds since the end of the one before.

        Raises:
            InvalidArgument: iterations is not positive, or warmup is negative.
            Timeout, PeerLost: A rank did not come, or went.
        """
        import numpy as np

        _check_counts(iterations, warmup)
        us = np.empty(max(iterations, warmup, 1), np.float64)
        for number in (warmup, iterations):
            self.clock(number, us.ctypes.data)
        return us[:iterations]


class Checked(Prepared):
    """A prepared call under KCCL_CHECK=1: the ranks first compare their calls."""

    def __init__(self, signature: str, *args: Any) -> None:
        super().__init__(*args)
        self._signature = signature

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if args or keywords:
            self._refuse(*args, **keywords)
        return self.after(partial(self._context.check_agreement, self._signature))


class OnStream(Prepared):
    """A prepared call on a GPU. It is enqueued on the given stream, or else on the current one."""

    def __init__(
        self,
        context: Context,
        plan: Plan,
        handle: Any,
        result: Any,
        keep: Any,
        stream: int | Callable[[], int],
    ) -> None:
        current = stream if callable(stream) else None
        super().__init__(context, plan, handle, result, keep, current)
        self._stream = stream
        if not callable(stream):
            context.backend.set_stream(handle, stream)
        self._graph = context.backend.as_graph(handle)  # kept alive for the handle

    @property
    def shape(self) -> tuple[int, int]:
        """Number of blocks, and threads of each."""
        return self._context.backend.shape_of(self._handle)

    def time(self, iterations: int, *, warmup: int = 0) -> "np.ndarray[Any, Any]":
        """Enqueues the call back to back, clocked by events of its stream. Collective.

        Two events enclose each batch of up to 100 calls. C enqueues a batch while it runs. So the
        time of a batch is the device's time or the host's time to enqueue it, whichever is longer.
        Waits for the last call.

        Args:
            iterations: Number of clocked calls.
            warmup: Number of calls before them.

        Returns:
            float64 [iterations]: microseconds of each call, as the mean over its batch.

        Raises:
            InvalidArgument: iterations is not positive, or warmup is negative.
            Timeout, PeerLost: A rank did not come, or went.
        """
        import numpy as np

        _check_counts(iterations, warmup)
        sizes = [
            min(_CALLS_PER_EVENT, iterations - begin)
            for begin in range(0, iterations, _CALLS_PER_EVENT)
        ]
        # clock() writes the host's time of each call here. It is not used.
        enqueued_us = np.empty(max(*sizes, warmup), np.float64)

        def enqueue(count: int) -> None:
            self.clock(count, enqueued_us.ctypes.data)

        stream = self._stream() if callable(self._stream) else self._stream
        enqueue(warmup)
        batches_us = self._context.backend.intervals_us(
            stream, [partial(enqueue, size) for size in sizes]
        )
        self._context.check_usable()
        return np.repeat(np.array(batches_us) / sizes, sizes)


class CheckedOnStream(Checked, OnStream):
    """A prepared call on a GPU under KCCL_CHECK=1."""


def prepared(
    context: Context,
    signature: str,
    plan: Plan,
    handle: Any,
    result: Any,
    keep: tuple[Any, ...],
    given: Any,
) -> Prepared:
    """The object that `.prepare` returns.

    Args:
        context, plan, handle, result: As in Prepared.
        signature: The call in words, for KCCL_CHECK=1.
        keep: Objects to keep alive. The first is the view of the caller's array; () for no array.
        given: The caller's `stream` argument.
    """
    backend = context.backend
    if backend.has_streams:
        stream = backend.stream_of_prepared(given, keep[0] if keep else None)
        facts = context, plan, handle, result, (*keep, given), stream
        return CheckedOnStream(signature, *facts) if context.checks else OnStream(*facts)
    if context.checks:
        return Checked(signature, context, plan, handle, result, keep)
    return Prepared(context, plan, handle, result, keep)


def _check_counts(iterations: int, warmup: int) -> None:
    if iterations <= 0 or warmup < 0:
        raise InvalidArgument(
            f"iterations is {iterations} and warmup {warmup}, must be positive and not negative"
        )


class Empty:
    """A prepared call over no elements: there is nothing to send."""

    __reduce_ex__ = call_is_not_copied

    def __init__(self, context: Context, plan: Plan, signature: str, result: Any) -> None:
        self.plan = plan
        self._context = context
        self._signature = signature
        self._result = result

    def __call__(self) -> Any:
        self._context.check_usable()
        self._context.check_agreement(self._signature)
        return self._result


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
