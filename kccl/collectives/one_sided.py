"""put, get, signal, wait: calls that one rank makes alone, on windows of all ranks."""

from typing import Any

from ..base import abi, arguments
from ..base.errors import InvalidArgument
from ..ranks import windows
from .context import Context


class OneSided:
    """The one-sided calls of a communicator, which is the only subclass."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._one_sided: dict[str, tuple[Any, Any]] = {}

    def put(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> None:
        """Copies x to byte `offset` of the peer's window; a later signal or barrier orders it.

        Here and below, `stream` is as in all_reduce; calls without an array go where the call
        before went.
        """
        view = self._context.backend.view(x, "x", writable=False)
        peer = self._peer(peer)
        address = self._remote(peer, window, offset, view.nbytes)
        number = self._context.backend.stream(stream, view)
        fields = {"input": view.address, "output": address, "count": view.nbytes}
        self._run_one_sided("put", number, peer=peer, **fields)

    def get(
        self, x: Any, peer: int, window: windows.Window, offset: int = 0, *, stream: Any = None
    ) -> Any:
        """Fills x from byte `offset` of the peer's window; returns x."""
        view = self._context.backend.view(x, "x", writable=True)
        peer = self._peer(peer)
        address = self._remote(peer, window, offset, view.nbytes)
        number = self._context.backend.stream(stream, view)
        fields = {"input": address, "output": view.address, "count": view.nbytes}
        self._run_one_sided("get", number, peer=peer, **fields)
        return x

    def signal(self, peer: int, signal_id: int = 0, *, stream: Any = None) -> None:
        """Adds one to the peer's signals under this id, after all earlier puts and stores."""
        signal_id = arguments.between("signal_id", signal_id, 0, abi.NUM_SIGNALS - 1)
        number = self._context.backend.stream(stream, None)
        self._run_one_sided("signal", number, peer=self._peer(peer), channel=signal_id)

    def wait(
        self,
        signal_id: int = 0,
        *,
        count: int = 1,
        peer: int | None = None,
        stream: Any = None,
    ) -> None:
        """Waits for `count` signals under this id and consumes them.

        Args:
            signal_id: Which signals.
            count: How many.
            peer: Only those of this rank; of any ranks together when None.
            stream: On a GPU, which stream waits.

        Raises:
            Timeout, PeerLost: They did not come.
        """
        sender = -1 if peer is None else self._peer(peer)
        signal_id = arguments.between("signal_id", signal_id, 0, abi.NUM_SIGNALS - 1)
        count = arguments.between("count", count, 1, 2**31 - 1)
        number = self._context.backend.stream(stream, None)
        self._run_one_sided("wait", number, peer=sender, channel=signal_id, count=count)

    def _run_one_sided(self, kernel: str, stream: int, **fields: int) -> None:
        if kernel not in self._one_sided:
            handle = self._context.backend.op(kernel)
            address = int(abi.ffi.cast("uintptr_t", handle))
            self._one_sided[kernel] = (
                handle,
                abi.fastcall.Op(address, None, self._context.raise_failure),
            )
        handle, op = self._one_sided[kernel]
        for name, value in fields.items():
            setattr(handle.call, name, value)
        self._context.backend.place(handle, stream)
        op()

    def _peer(self, peer: Any) -> int:
        return arguments.between("peer", peer, 0, self._context.world_size - 1)

    def _remote(self, peer: int, window: windows.Window, offset: int, nbytes: int) -> int:
        if not isinstance(window, windows.Window):
            raise InvalidArgument(f"window is {window!r}, must be what comm.window() returned")
        if window.mesh is not self._context.mesh:
            raise InvalidArgument("window is another communicator's, must be this one's")
        offset = arguments.integer("offset", offset)
        if not 0 <= offset <= window.nbytes - nbytes:
            raise InvalidArgument(
                f"offset is {offset} and x has {nbytes} bytes, must end within the window's "
                f"{window.nbytes} bytes"
            )
        return window.addresses[peer] + offset
