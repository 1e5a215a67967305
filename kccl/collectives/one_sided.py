"""put, get, signal, wait: calls that one rank makes alone. send and recv share their class Call.

On the host and on the simulator Python makes the first call of each of them, and C answers the
later ones (csrc/host/one_sided.cpp). For put and get Python makes the first call with each window
and element type. On a GPU Python makes all calls.
"""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from ..base import abi, arguments
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from ..plan.choice import Plan
from ..plan.spec import Request
from ..ranks import windows
from .context import Context
from .front import AnsweredByC
from .prepared import Arrays, Prepared, address_of, prepared


class Call(AnsweredByC, abi.fastcall.OneSided):
    """The call put, get, signal, wait, send or recv of one communicator."""

    # Keywords that C does not take. C passes a call with one of them to Python.
    _NOT_IN_C: tuple[str, ...] = ("stream",)

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: tuple[Any, Any] | None = None
        self._is_taught = False

    def _taught(self) -> tuple[Any, Any]:
        """Returns the call's handle and Op. Unless calls need streams, teaches C the call first."""
        context = self._context
        if self._known is None:
            handle = context.backend.call(self._NAME)
            op = abi.fastcall.Op(address_of(handle), None, context.raise_failure)
            self._known = handle, op
        handle, op = self._known
        if not self._is_taught and self.is_for_c():
            names, num_positional = self._names()
            self.learn(address_of(handle), handle, context.raise_failure, num_positional, names)
            self._is_taught = True
        return handle, op

    def is_for_c(self) -> bool:
        """Tells whether C may make the call without Python."""
        return not self._context.backend.has_streams

    def _run(self, stream: int, fields: Mapping[str, int]) -> None:
        context = self._context
        handle, op = self._taught()

        def fill() -> None:
            for name, value in fields.items():
                setattr(handle.call, name, value)
            context.backend.set_stream(handle, stream)

        op.after(fill)

    def _names(self) -> tuple[tuple[str, ...], int]:
        """Returns the names of the arguments that C takes, and how many may be positional."""
        found = [
            each
            for each in signature(self._slow).parameters.values()
            if each.name not in self._NOT_IN_C
        ]
        positional = [each for each in found if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        return tuple(each.name for each in found), len(positional)

    def _prepare(
        self,
        fields: Mapping[str, Any],
        result: Any,
        arrays: Arrays,
        given: Any,
        kernel: str = "",
        keep: Any = None,
    ) -> Prepared:
        """Prepares a call.

        Args:
            fields: Values for fields of KcclCall.
            result: What the call returns.
            arrays: The call's array, if it has one.
            given: The caller's `stream` argument.
            kernel: Name of the kernel. When "", the call's name.
            keep: Another object to keep alive with the call.
        """
        context = self._context
        backend = context.backend
        view: ArrayView | None = arrays[0][2] if arrays else None
        backend.stream(given, view)  # checks the argument
        context.check_usable()
        nbytes, dtype = (0, None) if view is None else (view.nbytes, view.dtype)
        request = Request(self._NAME, nbytes, context.world_size, backend.name, dtype)
        plan = Plan(self._NAME, request, "it has no alternative", ())
        handle = backend.call(kernel or self._NAME, **fields)
        return prepared(context, "", plan, handle, result, arrays, given, keep)

    def _peer(self, peer: Any) -> int:
        return arguments.between("peer", peer, 0, self._context.world_size - 1)

    def _copy(
        self, x: Any, peer: Any, window: Any, offset: Any, *, is_get: bool
    ) -> tuple[ArrayView, dict[str, int]]:
        """Checks the arguments of put or get. Returns the view of x, and the fields of the call."""
        view = self._context.backend.view(x, "x", writable=is_get)
        peer = self._peer(peer)
        if not isinstance(window, windows.Window):
            raise InvalidArgument(f"window is {window!r}, must be what comm.window() returned")
        if window.mesh is not self._context.mesh:
            raise InvalidArgument("window is another communicator's, must be this communicator's")
        offset = arguments.integer("offset", offset)
        if not 0 <= offset <= window.nbytes - view.nbytes:
            raise InvalidArgument(
                f"offset is {offset} and x has {view.nbytes} bytes, must lie within the window's "
                f"{window.nbytes} bytes"
            )
        remote = window.addresses[peer] + offset
        output, source = (view.address, remote) if is_get else (remote, view.address)
        return view, {"peer": peer, "output": output, "input": source, "count": view.nbytes}

    def _run_copy(
        self, x: Any, peer: Any, window: Any, offset: Any, stream: Any, *, is_get: bool
    ) -> None:
        view, fields = self._copy(x, peer, window, offset, is_get=is_get)
        self._run(self._context.backend.stream(stream, view), fields)
        # C's entry for a window has room for the addresses of MAX_WORLD_SIZE ranks only, so larger
        # windows stay with Python.
        is_kept = len(window.addresses) <= abi.MAX_WORLD_SIZE and view.is_direct
        if not self._context.backend.has_streams and is_kept:
            self.learn_window(window, window.nbytes, window.addresses, x.dtype, view.exchange_type)


class Put(Call):
    """Copies an array into a peer's window."""

    _NAME = "put"

    def __call__(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> None:
        """Copies x into the peer's window, from byte `offset` on.

        The peer may read it after a later signal or barrier of this rank.

        Args:
            x: Array, strided ones as in all_reduce.
            peer: Rank that gets the data; may be this rank.
            window: What comm.window() returned.
            offset: Offset in bytes.
            stream: As in all_reduce. signal() and wait() take no array. When stream is None, they
                use the current stream of the library whose array was used last.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: An earlier call failed.
        """
        self._run_copy(x, peer, window, offset, stream, is_get=False)

    def prepare(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> Prepared:
        """Checks the call once. Calling the returned object, `op()`, makes it, any number of times.

        Arguments and errors are those of the call itself. Each call copies what x holds then. The
        object keeps x and the window alive.
        """
        view, fields = self._copy(x, peer, window, offset, is_get=False)
        made = self._prepare(fields, None, [("x", x, view)], stream, keep=window)
        window.ends(made)
        return made


class Get(Call):
    """Copies bytes of a peer's window into an array."""

    _NAME = "get"

    def __call__(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> Any:
        """Copies bytes from `offset` on of the peer's window into x. Arguments as in put().

        Returns:
            x.
        """
        self._run_copy(x, peer, window, offset, stream, is_get=True)
        return x

    def prepare(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> Prepared:
        """Checks the call once. Calling the returned object, `op()`, makes it and returns x.

        Arguments and errors are those of the call itself. The object keeps x and the window alive.
        """
        view, fields = self._copy(x, peer, window, offset, is_get=True)
        made = self._prepare(fields, x, [("x", x, view)], stream, keep=window)
        window.ends(made)
        return made


class Signal(Call):
    """Adds one to a peer's signals."""

    _NAME = "signal"

    def __call__(self, peer: int, signal_id: int = 0, *, stream: Any = None) -> None:
        """Adds one to the peer's signals with this id.

        When the peer's wait() returns, it sees this rank's earlier puts and ordinary stores.

        Args:
            peer: Rank that gets the signal; may be this rank.
            signal_id: The id, from 0 to 63.
            stream: As in put().

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: An earlier call failed.
        """
        fields = self._fields(peer, signal_id)
        self._run(self._context.backend.stream(stream, None), fields)

    def prepare(self, peer: int, signal_id: int = 0, *, stream: Any = None) -> Prepared:
        """Checks the call once. Calling the returned object, `op()`, makes it."""
        return self._prepare(self._fields(peer, signal_id), None, (), stream)

    def _fields(self, peer: Any, signal_id: Any) -> dict[str, int]:
        return {"peer": self._peer(peer), "channel": _signal_id(signal_id)}


class Wait(Call):
    """Waits for signals."""

    _NAME = "wait"

    def __call__(
        self,
        signal_id: int = 0,
        *,
        count: int = 1,
        peer: int | None = None,
        stream: Any = None,
    ) -> None:
        """Waits for `count` signals with this id, and consumes them.

        Args:
            signal_id: The id of the signals.
            count: Number of signals.
            peer: The rank whose signals count. When None, signals of all ranks count.
            stream: On a GPU, the stream that waits.

        Raises:
            InvalidArgument: An argument is wrong.
            Timeout, PeerLost: The signals did not come.
        """
        fields = self._fields(signal_id, count, peer)
        self._run(self._context.backend.stream(stream, None), fields)

    def prepare(
        self,
        signal_id: int = 0,
        *,
        count: int = 1,
        peer: int | None = None,
        stream: Any = None,
    ) -> Prepared:
        """Checks the call once. Calling the returned object, `op()`, waits and consumes again."""
        return self._prepare(self._fields(signal_id, count, peer), None, (), stream)

    def _fields(self, signal_id: Any, count: Any, peer: Any) -> dict[str, int]:
        return {
            "peer": -1 if peer is None else self._peer(peer),
            "channel": _signal_id(signal_id),
            "count": arguments.between("count", count, 1, 2**31 - 1),
        }


def _signal_id(signal_id: Any) -> int:
    return arguments.between("signal_id", signal_id, 0, abi.NUM_SIGNALS - 1)


class OneSided:
    """The one-sided calls of a communicator, a part of the class Communicator."""

    # help() shows the texts. The first two slots allow other attributes and weak references.
    __slots__ = {
        "__dict__": "",
        "__weakref__": "",
        "get": Get.__doc__,
        "put": Put.__doc__,
        "signal": Signal.__doc__,
        "wait": Wait.__doc__,
    }
    context: Context
    get: Get
    put: Put
    signal: Signal
    wait: Wait

    def __init__(self) -> None:
        self.get = Get(self.context)
        self.put = Put(self.context)
        self.signal = Signal(self.context)
        self.wait = Wait(self.context)

    def _forget_one_sided(self) -> None:
        """Drops what C has been taught: no call of a closed communicator needs it."""
        for call in (self.get, self.put, self.signal, self.wait):
            call.forget()
