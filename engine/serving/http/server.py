"""Runs uvicorn's server with timeouts, and with a shutdown after which each client has its answer
or an error.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..sessions import Sessions

# Seconds between two checks, during shutdown, whether a second signal has come.
_LOOK_S = 0.1
# How many seconds answers have to end after they were cancelled.
_END_S = 5


class Connection(H11Protocol):
    """A connection with timeouts. It is closed if the header of a request does not come in time, or
    if the client does not read an answer in time.

    uvicorn itself has no timeout for headers and for clients that do not read. A few clients that
    send or read nothing would use up all connections.

    Attributes:
        read_s: How many seconds a client has to read what has been written to it. They begin when
            the system's buffers are full, which happens only if a client has stopped reading.
    """

    read_s = 30.0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer for the first header."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops both timers."""
        super().connection_lost(exc)
        self._unwatch()
        self.resume_writing()

    def pause_writing(self) -> None:
        """Starts the timer for a client that does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the timer for a client that does not read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        """Stops the timer when a header is complete. While one is incomplete, the timer runs on."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._watch()
        else:
            self._unwatch()

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """A server that gives requests some time to end after SIGINT or SIGTERM. After that time, or at
    a second signal, it cancels the remaining requests, whose clients get an error that says so.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        sessions: Callable[[], Sessions],
        tell: Callable[[str], None],
        drain_s: float,
    ) -> None:
        """Prepares to serve.

        Args:
            config: uvicorn's settings. Their timeout for shutdown is set here.
            sessions: Returns the queue whose requests are cancelled.
            tell: Shows a line to the person who started the server.
            drain_s: How many seconds requests have to end by themselves.
        """
        config.timeout_graceful_shutdown = int(drain_s + _END_S)
        super().__init__(config)
        self._sessions, self._tell, self._drain_s = sessions, tell, drain_s
        self._is_urgent = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the server, and shows its addresses."""
        await super().startup(sockets)
        for each in sockets or ():
            host, port = each.getsockname()[:2]
            self._tell(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. The first one begins the shutdown. A second one makes _end_requests()
        cancel requests at once; uvicorn itself would drop their connections.
        """
        if self.should_exit:
            self._is_urgent = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits until the requests have ended, or _end_requests() has cancelled them."""
        sessions = self._sessions()
        number = sessions.num_waiting + sessions.num_running
        if number:
            asked = f"{number} request{'s' if number > 1 else ''}"
            self._tell(f"waiting for {asked}; Ctrl-C again ends {'them' if number > 1 else 'it'}")
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending

    async def _end_requests(self) -> None:
        """Waits for drain_s, or for a second signal. Then cancels the remaining requests."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_s
        while not self._is_urgent and loop.time() < end:
            await asyncio.sleep(_LOOK_S)
        # close() blocks until the engine's thread has ended, so another thread calls it.
        await asyncio.to_thread(self._sessions().close)


def ignore_signals() -> None:
    """Installs signal handlers that do nothing. uvicorn raises the signal again after its shutdown.
    Without these handlers that signal would kill this process, which would not end by itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
