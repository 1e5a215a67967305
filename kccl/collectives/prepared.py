"""Prepared calls: the objects that `.prepare` returns. C (kccl._fastcall) runs them without a
Python frame.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ..base.abi import fastcall, ffi
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from .context import Context
from .front import call_is_not_copied
from .written import NOTHING, Written

if TYPE_CHECKING:
    import numpy as np


# On a GPU two events clock this many calls together, because an event costs as much as a call.
_CALLS_PER_EVENT = 100


Arrays = Sequence[tuple[str, Any, ArrayView]]
"""The arrays of a prepared call: the name of the argument, the caller's object, and its view."""


def check_unmoved(context: Context, call: str, arrays: Arrays) -> None:
    """Checks that the arrays of a prepared call still have the memory that they had at prepare().

    Args:
        context: The Context of the communicator.
        call: The method that prepared the call, as in "all_reduce.prepare".
        arrays: The arrays.

    Raises:
        InvalidArgument: An array has other memory.
    """
    for name, array, view in arrays:
        now = context.backend.view(array, name, writable=False)
        if (now.address, now.nbytes) != (view.address, view.nbytes):
            raise InvalidArgument(
                f"rank {context.rank}: {call}: {name} had {view.nbytes} bytes at "
                f"{view.address:#x}, and now has {now.nbytes} at {now.address:#x}: the array was "
                "resized, or given other memory. Prepare the call again; nothing was sent"
            )


def address_of(handle: Any) -> int:
    """Returns the address of a call's struct, as C takes it."""
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

        # C calls stream() before each run, so no run gets past it.
        fastcall.Op.__init__(
            self, address_of(self._handle), None, self._context.raise_failure, stream
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error. C calls it when `op()` is given arguments."""
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
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        import numpy as np

        _check_counts(iterations, warmup)
        us = np.empty(max(iterations, warmup, 1), np.float64)
        for number in (warmup, iterations):
            self.clock(number, us.ctypes.data)
        return us[:iterations]


class Checked(Prepared):
    """A prepared call under KCCL_CHECK=1. Before each run it checks that the arrays still have the
    memory that they had at prepare(), and the ranks compare their calls.
    """

    def __init__(
        self, name: str, signature: str, written: Written, arrays: Arrays, *args: Any
    ) -> None:
        """`name` is the collective's; see prepared() for `signature` and `written`."""
        super().__init__(*args)
        self._name = f"{name}.prepare"
        self._signature = signature
        self._written = written
        self._arrays = arrays

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if args or keywords:
            self._refuse(*args, **keywords)
        return self.after(self._check)

    def time(self, iterations: int, *, warmup: int = 0) -> "np.ndarray[Any, Any]":
        """See Prepared."""
        check_unmoved(self._context, self._name, self._arrays)
        return super().time(iterations, warmup=warmup)

    def _check(self) -> None:
        check_unmoved(self._context, self._name, self._arrays)
        if self._signature:
            self._context.check_agreement(self._signature, self._written)


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
        self._graph = context.backend.as_graph(handle)  # kept alive: the handle refers to it

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the number of blocks, and the threads of each."""
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
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        import numpy as np

        _check_counts(iterations, warmup)
        sizes = [
            min(_CALLS_PER_EVENT, iterations - begin)
            for begin in range(0, iterations, _CALLS_PER_EVENT)
        ]
        # clock() writes the host's time of each call here, which is not used.
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
    arrays: Arrays,
    given: Any,
    keep: Any = None,
    written: Written = NOTHING,
) -> Prepared:
    """Makes the object that `.prepare` returns.

    Args:
        context, plan, handle, result: As in Prepared.
        signature: The call in words, which the ranks compare under KCCL_CHECK=1; "" if it is not
            collective.
        arrays: The caller's arrays. If `given` is None, the first one's library gives the stream.
        given: The caller's `stream` argument.
        keep: Another object to keep alive with the call.
        written: As in Context.check_agreement().
    """
    backend = context.backend
    words = plan.request.collective, signature, written, arrays
    if backend.has_streams:
        stream = backend.stream_of_prepared(given, arrays[0][2] if arrays else None)
        facts = context, plan, handle, result, (arrays, keep, given), stream
        return CheckedOnStream(*words, *facts) if context.checks else OnStream(*facts)
    facts_here = context, plan, handle, result, (arrays, keep)
    return Checked(*words, *facts_here) if context.checks else Prepared(*facts_here)


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
