"""How `kccl run` tells ranks that wait at start-up for a rank that has ended."""

import hashlib
import os
import select
import selectors
import socket
import struct
from collections.abc import Callable
from functools import partial

from ..base import clock
from ..base.errors import BackendError, PeerLost, Timeout
from . import sockets
from .dialing import dial, new_socket

_RANK = struct.Struct("<I")
_LOOK_S = 0.2  # seconds between two calls of Watch's `look`


def _name(job: str) -> str:
    return "kccl-" + hashlib.sha256(f"losses {os.getuid()} {job}".encode()).hexdigest()[:32]


class Announcer:
    """Tells waiting ranks which ranks have ended. The launcher's process has one; ranks connect to
    it by Watch. None of its methods blocks.

    It registers its sockets with the launcher's selector. The `data` of each registered socket is a
    callback, which the launcher must call when the socket is ready.
    """

    def __init__(self, job: str, selector: selectors.BaseSelector) -> None:
        """Takes the job's unique name, which the ranks pass to Watch."""
        self._ended = b""
        self._selector = selector
        self._connections: set[socket.socket] = set()
        self._listener = sockets.bind(_name(job))
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def announce(self, rank: int) -> None:
        """Tells all ranks that have connected, and those that will, that `rank` has ended."""
        self._ended += _RANK.pack(rank)
        for connection in list(self._connections):
            self._tell(connection, _RANK.pack(rank))

    def close(self) -> None:
        """Ends the announcements."""
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._connections.add(connection)
        # Ranks send nothing to the announcer, so a socket becomes readable only when the rank
        # closes it.
        end = partial(self._drop, connection)
        self._selector.register(connection, selectors.EVENT_READ, end)
        self._tell(connection, self._ended)

    def _tell(self, connection: socket.socket, ranks: bytes) -> None:
        try:
            connection.send(ranks)
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()


class Watch:
    """A waiting rank's end of the connection: its waits at start-up end when the launcher
    announces that a rank has ended.
    """

    def __init__(self, rank: int, job: str, look: Callable[[], None]) -> None:
        """Connects with the announcer, if there is one for the job.

        Args:
            rank: This rank.
            job: The job's unique name.
            look: Called now and then during a wait. What it raises ends the wait.
        """
        self._rank = rank
        self._look = look
        self._looked = 0.0
        self._socket: socket.socket | None = new_socket()
        try:
            dial(self._socket, _name(job))
        except ConnectionError:
            self.close()
            return
        except BaseException:
            self.close()
            raise
        try:
            sockets.peer_pid(self._socket)
        except BackendError:  # another user's process has taken the name
            self.close()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def wait(self, source: socket.socket | None, seconds: float) -> bool:
        """Waits until `source` can be read, and returns True then.

        Returns False after `seconds` or earlier, so the caller must call wait() again. A `source`
        of None is never ready.

        Raises:
            PeerLost: The launcher has announced that a rank has ended.
        """
        seconds = min(seconds, _LOOK_S)
        if clock.now() > self._looked + _LOOK_S:
            self._looked = clock.now()
            self._look()
        poll = select.poll()
        for each in filter(None, (source, self._socket)):
            poll.register(each, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(sockets.poll_ms(seconds))]
        if source is not None and source.fileno() in ready:
            return True
        if ready and self._socket is not None:
            ended = self._socket.recv(_RANK.size)
            if ended:
                raise ended_before(self._rank, *_RANK.unpack(ended))
            # The launcher has ended. Its guard process will end this process.
            self.close()
        return False


def ended_before(rank: int, peer: int) -> PeerLost:
    """Returns what `rank` raises for a peer that ended before it came to the start-up."""
    return PeerLost(
        f"rank {rank} lost rank {peer} at start-up: it ended before its kccl.init(), or could not "
        "start: what it has printed says why",
        rank=rank,
        peer=peer,
        collective="start-up",
    )


def absent(rank: int, missing: int | None, *, by_mpi: bool = False) -> Timeout:
    """Returns what `rank` raises for ranks that did not come to the start-up in time.

    Args:
        rank: The rank that waited.
        missing: The rank that did not come; None if it is not known which.
        by_mpi: The ranks meet by MPI.
    """
    whom, it_is = f"rank {missing}", "it has"
    if missing is None:
        whom, it_is = "the other ranks", "they have"
    if by_mpi:
        why = (
            ". Under mpirun a program that fails between its `from mpi4py import MPI` and its "
            "`import kccl` waits in MPI_Finalize, and nobody can see that: import kccl first"
        )
    else:
        be = "is" if it_is == "it has" else "are"
        why = (
            f", or {be} in another network or user namespace (another container), where the ranks "
            "cannot see each other"
        )
    return Timeout(
        f"rank {rank} waited too long for {whom} at start-up (KCCL_FIRST_TIMEOUT is the limit): "
        f"{it_is} not called kccl.init(){why}",
        rank=rank,
        peer=missing,
        collective="start-up",
    )
