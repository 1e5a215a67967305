"""put, get, signal, wait: calls that one rank makes alone."""

from typing import Any

from ..base import abi, arguments
from ..base.errors import InvalidArgument
from ..ranks import windows
from .context import Context


class OneSided:
    """The one-sided calls of a communicator, a part of the class Communicator."""

    context: Context

    def __init__(self) -> None:
        self._one_sided: dict[str, tuple[Any, Any]] = {}

    def put(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> None:
        """Copies x into the peer's window, from byte `offset` on.

        The peer may read it after a later signal or barrier of this rank.

        Args:
            x: C-contiguous array.
            peer: Rank that gets the data; may be this rank.
            window: What comm.window() returned.
            offset: Offset in bytes.
            stream: As in all_reduce. signal() and wait() take no array. When stream is None, they
                use the current stream of the library whose array was used last.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: An earlier call failed.
        """
        view = self.context.backend.view(x, "x", writable=False)
        peer = self._peer(peer)
        address = self._remote(peer, window, offset, view.nbytes)
        stream = self.context.backend.stream(stream, view)
        fields = {"input": view.address, "output": address, "count": view.nbytes}
        self._run_one_sided("put", stream, peer=peer, **fields)

    def get(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> Any:
        """Copies bytes from `offset` on of the peer's window into x. Arguments as in put().

        Returns:
            x.
        """
        view = self.context.backend.view(x, "x", writable=True)
        peer = self._peer(peer)
        address = self._remote(peer, window, offset, view.nbytes)
        stream = self.context.backend.stream(stream, view)
        fields = {"input": address, "output": view.address, "count": view.nbytes}
        self._run_one_sided("get", stream, peer=peer, **fields)
        return x

    def signal(self, peer: int, signal_id: int = 0, *, stream: Any = None) -> None:
        """Adds one to the peer's signals with this id.

        When the peer's wait() returns, it sees this rank's earlier puts and ordinary stores.
        """
        signal_id = arguments.between("signal_id", signal_id, 0, abi.NUM_SIGNALS - 1)
        stream = self.context.backend.stream(stream, None)
        self._run_one_sided("signal", stream, peer=self._peer(peer), channel=signal_id)

    def wait(
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
            peer: Counts only this rank's signals. When None, those of all ranks together.
            stream: On a GPU, the stream that waits.

        Raises:
            InvalidArgument: An argument is wrong.
            Timeout, PeerLost: The signals did not come.
        """
        sender = -1 if peer is None else self._peer(peer)
        signal_id = arguments.between("signal_id", signal_id, 0, abi.NUM_SIGNALS - 1)
        count = arguments.between("count", count, 1, 2**31 - 1)
        stream = self.context.backend.stream(stream, None)
        self._run_one_sided("wait", stream, peer=sender, channel=signal_id, count=count)

    def _run_one_sided(self, kernel: str, stream: int, **fields: int) -> None:
        if kernel not in self._one_sided:
            handle = self.context.backend.call(kernel)
            address = int(abi.ffi.cast("uintptr_t", handle))
            self._one_sided[kernel] = (
                handle,
                abi.fastcall.Op(address, None, self.context.raise_failure),
            )
        handle, op = self._one_sided[kernel]

        def fill() -> None:
            for name, value in fields.items():
                setattr(handle.call, name, value)
            self.context.backend.set_stream(handle, stream)

        op.after(fill)

    def _peer(self, peer: Any) -> int:
        return arguments.between("peer", peer, 0, self.context.world_size - 1)

    def _remote(self, peer: int, window: windows.Window, offset: int, nbytes: int) -> int:
        if not isinstance(window, windows.Window):
            raise InvalidArgument(f"window is {window!r}, must be what comm.window() returned")
        if window.mesh is not self.context.mesh:
            raise InvalidArgument("window is another communicator's, must be this communicator's")
        offset = arguments.integer("offset", offset)
        if not 0 <= offset <= window.nbytes - nbytes:
            raise InvalidArgument(
                f"offset is {offset} and x has {nbytes} bytes, must lie within the window's "
                f"{window.nbytes} bytes"
            )
        return window.addresses[peer] + offset
