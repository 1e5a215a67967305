"""The out-of-band connection of a communicator's ranks: a Unix socket between each two.

It carries what is rare and may be slow: names, memory handles (as SCM_RIGHTS), agreement after a
failure. A waiting rank sleeps. The sockets have names in the abstract namespace, so a killed rank
leaves nothing behind, and a rank's end is seen as the end of its stream.
"""

import array
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from .errors import BackendError, PeerLost, Timeout

_HEADER = struct.Struct("<4sIQ")  # kind, sequence number, bytes that follow
_FD_BYTES = array.array("i").itemsize
_UCRED = struct.Struct("3i")


def listen() -> tuple[socket.socket, str]:
    """A listening socket, and the name under which `connect` finds it."""
    name = f"kccl-{os.urandom(16).hex()}"
    return bind(name), name


def bind(name: str) -> socket.socket:
    """A socket listening under `name`; OSError when the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def peer_pid(connection: socket.socket) -> int:
    """Process id of the other side.

    Raises:
        BackendError: The other side belongs to another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    if uid != os.getuid():
        raise BackendError(f"a process of user {uid} answered, expected user {os.getuid()}")
    return int(pid)


def connect(
    rank: int, names: list[str], listener: socket.socket, deadline: float
) -> dict[int, socket.socket]:
    """Connects this rank with every other; `names[r]` is rank r's listener. Collective.

    Raises:
        Timeout: A rank did not connect before `deadline` (of time.monotonic()).
        PeerLost: A rank's listener is gone.
    """
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer] = connection
            try:
                connection.connect(f"\0{names[peer]}")
            except ConnectionRefusedError:
                raise PeerLost(
                    f"rank {rank} cannot connect to rank {peer}: its process has ended",
                    rank=rank,
                    peer=peer,
                    collective="start-up",
                ) from None
            peer_pid(connection)
            connection.sendall(struct.pack("<I", rank))
        while len(sockets) < len(names) - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(len(names))) - set(sockets) - {rank})
                raise Timeout(
                    f"rank {rank} waited in vain for rank {missing[0]} to connect",
                    rank=rank,
                    peer=missing[0],
                    collective="start-up",
                ) from None
            peer_pid(connection)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            (peer,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
            sockets[peer] = connection
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    finally:
        listener.close()
    return sockets


class _Link:
    """One peer's stream: bytes received and not yet used, descriptors received and not yet taken."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.received = bytearray()
        self.fds: list[int] = []
        self.is_open = True

    def fill(self) -> None:
        """Receives what has arrived; a stream that ended turns `is_open` off."""
        while self.is_open:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(_FD_BYTES))
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            for _, _, payload in ancillary:
                self.fds.extend(array.array("i", payload[: len(payload) // _FD_BYTES * _FD_BYTES]))
            self.received += data
            self.is_open = len(data) > 0

    def take(self) -> tuple[bytes, int, bytes] | None:
        """The next whole message as (kind, sequence number, payload)."""
        if len(self.received) < _HEADER.size:
            return None
        kind, sequence, length = _HEADER.unpack_from(self.received)
        end = _HEADER.size + length
        if len(self.received) < end:
            return None
        payload = bytes(self.received[_HEADER.size : end])
        del self.received[:end]
        return kind, sequence, payload


class Mesh:
    """The connected ranks. All methods but `close` are collective among the ranks they name."""

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._links = {peer: _Link(connection) for peer, connection in sockets.items()}
        self._sequence = 0
        self._round = 0
        self.pidfds = {peer: self._open_pidfd(link.socket) for peer, link in self._links.items()}

    @staticmethod
    def _open_pidfd(connection: socket.socket) -> int:
        pid = peer_pid(connection)
        if pid == os.getpid():
            return -1
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            raise BackendError(f"pidfd_open({pid}) failed: {error}") from error

    def allgather(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        """Every rank's payload, in rank order.

        Args:
            payload: Any bytes; ranks may differ in length.
            what: What the ranks are doing, for error messages.
            timeout: Seconds to wait for the slowest.

        Raises:
            Timeout: A rank did not take part in time.
            PeerLost: A rank is gone.
        """
        got = self._exchange(b"data", self._next(), payload, what, timeout, self._links)
        lost = sorted(set(self._links) - set(got))
        if lost:
            raise PeerLost(
                f"rank {self.rank} lost rank {lost[0]} during {what}: its process has ended",
                rank=self.rank,
                peer=lost[0],
                collective=what,
            )
        return [payload if rank == self.rank else got[rank] for rank in range(self.world_size)]

    def exchange_fds(self, fd: int, what: str, timeout: float) -> list[int]:
        """Gives `fd` to every rank and returns every rank's, as descriptors of this process.

        The caller closes them; the one at its own rank is a duplicate.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.allgather(b"", what, timeout)
        for link in self._links.values():
            # A byte with a descriptor fits the stream's empty buffer, so this never blocks for long.
            link.socket.sendmsg([_HEADER.pack(b"fd  ", self._sequence, 0)], ancillary)
        self._exchange(b"fd  ", self._next(), None, what, timeout, self._links)
        fds = []
        for rank in range(self.world_size):
            if rank == self.rank:
                fds.append(os.dup(fd))
                continue
            if not self._links[rank].fds:
                raise PeerLost(
                    f"rank {self.rank} lost rank {rank} during {what}: its process has ended",
                    rank=self.rank,
                    peer=rank,
                    collective=what,
                )
            fds.append(self._links[rank].fds.pop(0))
        return fds

    def agree_on_survivors(self, payload: bytes, timeout: float) -> dict[int, bytes]:
        """The ranks that are alive, the same on each of them, with their payloads.

        Ranks tell each other whom they hear, round by round, until all that hear each other say the
        same.

        Raises:
            Timeout: A rank that is alive did not take part in time.
        """
        alive = {peer for peer, link in self._links.items() if link.is_open}
        while True:
            self._round += 1
            view = sorted(alive | {self.rank})
            message = bytes([len(view), *view]) + payload
            links = {peer: self._links[peer] for peer in alive}
            got = self._exchange(b"live", self._round, message, "shrink", timeout, links)
            views = {peer: set(text[1 : 1 + text[0]]) for peer, text in got.items()}
            if set(got) == alive and all(seen == set(view) for seen in views.values()):
                payloads = {peer: text[1 + text[0] :] for peer, text in got.items()}
                return dict(sorted((payloads | {self.rank: payload}).items()))
            alive = {peer for peer in got if all(peer in seen for seen in views.values())}

    def close(self) -> None:
        """Ends this rank's streams. Idempotent."""
        for peer, link in self._links.items():
            link.socket.close()
            link.is_open = False
            for fd in link.fds:
                os.close(fd)
            link.fds.clear()
            if self.pidfds[peer] >= 0:
                os.close(self.pidfds[peer])
                self.pidfds[peer] = -1

    def _next(self) -> int:
        sequence = self._sequence
        self._sequence = (sequence + 1) & 0xFFFFFFFF
        return sequence

    def _exchange(
        self,
        kind: bytes,
        sequence: int,
        payload: bytes | None,
        what: str,
        timeout: float,
        links: dict[int, _Link],
    ) -> dict[int, bytes]:
        """Sends `payload` (unless None) to the links and takes one message of each that lives."""
        deadline = time.monotonic() + timeout
        message = b"" if payload is None else _HEADER.pack(kind, sequence, len(payload)) + payload
        unsent = {peer: memoryview(message) for peer, link in links.items() if link.is_open}
        got: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for peer in unsent:
                selector.register(
                    links[peer].socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer
                )
            while True:
                for peer, link in links.items():
                    if peer not in got:
                        self._take(link, peer, kind, sequence, got)
                ended = {peer for peer, link in links.items() if not link.is_open}
                if all(not rest for peer, rest in unsent.items() if peer not in ended) and (
                    set(links) <= set(got) | ended
                ):
                    return got
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    late = sorted(set(links) - set(got) - ended) or sorted(unsent)
                    raise Timeout(
                        f"rank {self.rank} waited {timeout:.3g} s for rank {late[0]} during {what}",
                        rank=self.rank,
                        peer=late[0],
                        collective=what,
                        waited_s=timeout,
                    )
                self._pump(selector, selector.select(remaining), links, unsent)

    def _pump(
        self,
        selector: selectors.BaseSelector,
        ready: Iterable[tuple[selectors.SelectorKey, int]],
        links: dict[int, _Link],
        unsent: dict[int, Any],
    ) -> None:
        """Sends and receives what the sockets allow now."""
        for key, events in ready:
            peer, link = key.data, links[key.data]
            if events & selectors.EVENT_READ:
                link.fill()
            if events & selectors.EVENT_WRITE and unsent[peer]:
                try:
                    unsent[peer] = unsent[peer][link.socket.send(unsent[peer]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    link.is_open = False
            if not link.is_open:
                selector.unregister(link.socket)
            elif not unsent[peer]:
                selector.modify(link.socket, selectors.EVENT_READ, peer)

    def _take(
        self, link: _Link, peer: int, kind: bytes, sequence: int, got: dict[int, bytes]
    ) -> None:
        """Moves the peer's message of this exchange into `got`, if it is there."""
        while (message := link.take()) is not None:
            seen_kind, seen_sequence, payload = message
            if (seen_kind, seen_sequence) == (kind, sequence):
                got[peer] = payload
                return
            # After a failure the streams may hold messages of exchanges that were given up.
            if kind == b"live":
                continue
            raise BackendError(
                f"rank {self.rank} is at step {sequence} and rank {peer} at step {seen_sequence} of "
                "their out-of-band exchanges: not all ranks made the same calls in the same order"
            )
