"""The callable faces of a communicator: `comm.all_reduce(x)` and what `.prepare` returns.

Both rest on kccl._fastcall, which makes a known call without a Python frame. What it does not know
comes through `_slow` here, is checked argument by argument, and is taught to it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import arguments, arrays
from .abi import fastcall, ffi
from .arrays import ArrayView
from .errors import BackendError, InvalidArgument
from .plan import OPS, Plan

if TYPE_CHECKING:
    import numpy as np

    from .comm import Communicator


# Calls a communicator remembers; a program that uses more sizes plans some of them again.
_KNOWN_CALLS = 1024


def _address(handle: Any) -> int:
    return int(ffi.cast("uintptr_t", handle))


class Prepared(fastcall.Op):  # type: ignore[misc]  # a C type
    """A call planned once, to be made many times: `op()` runs it and returns the result array.

    Attributes:
        plan: How it runs, and why so.
    """

    def __init__(
        self, comm: "Communicator", plan: Plan, handle: Any, result: Any, keep: Any
    ) -> None:
        super().__init__(_address(handle), result, comm._raise_failure)
        self.plan = plan
        self._comm = comm
        self._handle = handle
        self._keep = keep

    def time(self, iterations: int, *, warmup: int = 0) -> "np.ndarray[Any, Any]":
        """Makes the call back to back, clocked in C. Collective.

        Args:
            iterations: Number of clocked calls.
            warmup: Calls before them.

        Returns:
            float64 [iterations]: microseconds from the end of the call before to the end of each.
        """
        import numpy as np

        if iterations <= 0 or warmup < 0:
            raise InvalidArgument(
                f"iterations is {iterations} and warmup {warmup}, must be positive and not negative"
            )
        us = np.empty(max(iterations, warmup, 1), np.float64)
        for number in (warmup, iterations):
            self.clock(number, us.ctypes.data)
        return us[:iterations]


class Checked(Prepared):
    """A prepared call under KCCL_CHECK=1: the ranks first compare what they are about to do."""

    def __init__(self, signature: str, *args: Any) -> None:
        super().__init__(*args)
        self._signature = signature

    def __call__(self) -> Any:
        self._comm._check_agreement(self._signature)
        return super().__call__()


class OnStream(Checked):
    """A prepared call that is enqueued on a stream: the one it was given, else the current one."""

    def __init__(self, signature: str, stream: Any, *args: Any) -> None:
        super().__init__(signature, *args)
        self._stream = stream

    def __call__(self) -> Any:
        view = None if self._keep is None else self._keep[0]
        backend = self._comm._backend
        backend.place(self._handle, backend.stream(self._stream, view))
        return super().__call__()

    def time(self, iterations: int, *, warmup: int = 0) -> "np.ndarray[Any, Any]":
        """Not for calls on a GPU, which return before they have run: use its events."""
        raise BackendError("time() clocks calls that have run when they return; use CUDA events")


class Empty:
    """A prepared call over no elements: there is nothing to send."""

    def __init__(self, comm: "Communicator", plan: Plan, signature: str, result: Any) -> None:
        self.plan = plan
        self._comm = comm
        self._signature = signature
        self._result = result

    def __call__(self) -> Any:
        self._comm._check_usable()
        self._comm._check_agreement(self._signature)
        return self._result


class Collective(fastcall.Dispatcher):  # type: ignore[misc]  # a C type
    """One collective of one communicator. Subclasses say in `_slow` what its arguments mean."""

    _slow: Callable[..., Any]
    # The keyword whose values the fast path tells apart.
    _OPTION: str

    def __init__(self, comm: "Communicator") -> None:
        super().__init__(self._slow, self._OPTION)
        self._comm = comm
        self._ops: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def _channel(self, channel: Any) -> int:
        return arguments.between("channel", channel, 0, self._comm.num_channels - 1)

    def _run(
        self,
        key: tuple[Any, ...],
        make: Any,
        signature: str,
        x: ArrayView,
        out: ArrayView,
        stream: int,
    ) -> Any:
        """Makes the call known under `key`, made by `make` the first time, on these arrays."""
        known = self._ops.get(key)
        if known is None:
            if len(self._ops) >= _KNOWN_CALLS:
                self._ops.clear()
            handle = make()
            known = handle, fastcall.Op(_address(handle), None, self._comm._raise_failure)
            self._ops[key] = known
        handle, op = known
        handle.call.input = x.address
        handle.call.output = out.address
        self._comm._backend.place(handle, stream)
        self._comm._check_agreement(signature)
        op()
        return handle

    def _learn(self, array: Any, value: Any, default: Any, x: ArrayView, handle: Any) -> None:
        """Lets the fast path take the next call with such an array and this value of the option."""
        if x.is_buffer and not self._comm.checks:
            for given in (value, ...) if value == default else (value,):
                self.learn(
                    array.dtype,
                    x.nbytes,
                    given,
                    _address(handle),
                    handle,
                    self._comm._raise_failure,
                )


class AllReduce(Collective):
    """all_reduce(x, *, out=None, op="sum", stream=None, channel=0): reduces over all ranks."""

    _OPTION = "op"

    def _slow(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Every rank's `out` becomes the element-wise reduction of all ranks' `x`.

        Args:
            x: Array of any shape, C-contiguous: float32, float64, float16, bfloat16, int32, int64.
                The same size and type on every rank.
            out: Array for the result, same size and type; x itself when None.
            op: "sum", "prod", "min", "max", or for floats "avg".
            stream: On a GPU, where the call is enqueued: an integer, or something with
                __cuda_stream__; the current stream of x's library when None. On the host None.
            channel: Independent stream of calls, below `comm.num_channels`.
            algorithm: Name of the algorithm to use; the plan's choice when "".

        Returns:
            `out`, or x. The same bits on every rank.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not come, or went.
        """
        channel = self._channel(channel)
        x_view, out_view = self._views(x, out, op)
        place = self._comm._backend.stream(stream, x_view)
        plan = self._comm._plan("all_reduce", x_view.nbytes, x_view.dtype, algorithm)
        if x_view.count > 0:
            key = (x_view.dtype, x_view.count, op, channel, plan.name)
            handle = self._run(
                key,
                lambda: self._make(plan, x_view, op, channel),
                self._signature(plan, x_view, op, channel),
                x_view,
                out_view,
                place,
            )
            if out is None and channel == 0 and not algorithm:
                self._learn(x, op, "sum", x_view, handle)
        else:
            self._comm._check_usable()
            self._comm._check_agreement(self._signature(plan, x_view, op, channel))
        return x if out is None else out

    def prepare(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Plans the call once; `op()` on what it returns makes it, as often as wanted.

        Arguments, result and errors as in the call itself. The arrays stay referenced.
        """
        channel = self._channel(channel)
        x_view, out_view = self._views(x, out, op)
        self._comm._backend.stream(stream, x_view)
        plan = self._comm._plan("all_reduce", x_view.nbytes, x_view.dtype, algorithm)
        result = x if out is None else out
        signature = self._signature(plan, x_view, op, channel)
        if x_view.count == 0:
            return Empty(self._comm, plan, signature, result)
        handle = self._make(plan, x_view, op, channel)
        handle.call.input = x_view.address
        handle.call.output = out_view.address
        return self._comm._prepared(signature, plan, handle, result, (x_view, out_view, x), stream)

    def _views(self, x: Any, out: Any, op: str) -> tuple[ArrayView, ArrayView]:
        x_view = self._comm._backend.view(x, "x", writable=out is None)
        if not isinstance(op, str) or op not in OPS:
            raise InvalidArgument(f"op is {op!r}, must be one of {', '.join(OPS)}")
        if op == "avg" and not x_view.dtype.is_float:
            raise InvalidArgument(
                f"op is 'avg' and x has dtype {x_view.dtype.name}, must be a float"
            )
        if out is None:
            return x_view, x_view
        out_view = self._comm._backend.view(out, "out", writable=True)
        arrays.same_kind(x_view, out_view)
        return x_view, out_view

    def _make(self, plan: Plan, x: ArrayView, op: str, channel: int) -> Any:
        return self._comm._backend.op(
            plan.name, dtype=x.dtype.name, op=op, count=x.count, channel=channel
        )

    @staticmethod
    def _signature(plan: Plan, x: ArrayView, op: str, channel: int) -> str:
        what = f"all_reduce, {x.nbytes} bytes, {x.dtype.name}, {op}"
        return f"{what}, channel {channel}, {plan.name}"


class Broadcast(Collective):
    """broadcast(x, root=0, *, stream=None, channel=0): copies the root's x to all ranks."""

    _OPTION = "root"

    def _slow(
        self,
        x: Any,
        root: int = 0,
        *,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Every rank's `x` becomes the root's, bit by bit.

        Args:
            x: Array of any shape, C-contiguous; the same size and type on every rank.
            root: The rank to copy from.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            x.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not come, or went.
        """
        channel = self._channel(channel)
        root = arguments.between("root", root, 0, self._comm.world_size - 1)
        view = self._view(x, root)
        place = self._comm._backend.stream(stream, view)
        plan = self._comm._plan("broadcast", view.nbytes, view.dtype, algorithm)
        if view.count > 0:
            key = (view.nbytes, root, channel, plan.name)
            handle = self._run(
                key,
                lambda: self._make(plan, view, root, channel),
                self._signature(plan, view, root, channel),
                view,
                view,
                place,
            )
            if channel == 0 and not algorithm:
                self._learn(x, root, 0, view, handle)
        else:
            self._comm._check_usable()
            self._comm._check_agreement(self._signature(plan, view, root, channel))
        return x

    def prepare(
        self,
        x: Any,
        root: int = 0,
        *,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> Any:
        """Plans the call once; `op()` on what it returns makes it, as often as wanted."""
        channel = self._channel(channel)
        root = arguments.between("root", root, 0, self._comm.world_size - 1)
        view = self._view(x, root)
        self._comm._backend.stream(stream, view)
        plan = self._comm._plan("broadcast", view.nbytes, view.dtype, algorithm)
        signature = self._signature(plan, view, root, channel)
        if view.count == 0:
            return Empty(self._comm, plan, signature, x)
        handle = self._make(plan, view, root, channel)
        handle.call.input = handle.call.output = view.address
        return self._comm._prepared(signature, plan, handle, x, (view, x), stream)

    def _view(self, x: Any, root: int) -> ArrayView:
        return self._comm._backend.view(x, "x", writable=self._comm.rank != root)

    def _make(self, plan: Plan, x: ArrayView, root: int, channel: int) -> Any:
        return self._comm._backend.op(plan.name, count=x.nbytes, peer=root, channel=channel)

    @staticmethod
    def _signature(plan: Plan, x: ArrayView, root: int, channel: int) -> str:
        what = f"broadcast, {x.nbytes} bytes, {x.dtype.name}, root {root}"
        return f"{what}, channel {channel}, {plan.name}"


class Barrier(Prepared):
    """barrier(): returns when every rank has called it; orders earlier puts and ordinary stores."""

    def prepare(self, *, stream: Any = None, channel: int = 0) -> Prepared:
        """A barrier to be called many times, on the given channel, on a GPU on the given stream."""
        barrier: Prepared = self._comm._prepared_barrier(stream, channel)
        return barrier


class CheckedBarrier(Checked, Barrier):
    """The same under KCCL_CHECK=1."""


class BarrierOnStream(OnStream, Barrier):
    """The same on a GPU: orders what its stream did before, on all ranks."""

    def __call__(self, *, stream: Any = None) -> Any:
        self._stream = stream
        return super().__call__()
