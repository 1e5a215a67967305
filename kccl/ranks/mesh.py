"""The out-of-band connection of a communicator's ranks: a Unix socket between each two ranks.

It carries what is rare and may be slow: names, memory handles (as SCM_RIGHTS), agreement after a
failure. A waiting rank sleeps. When a rank's process ends, its peers see the end of its stream.
sockets.py makes the connections.
"""

import array
import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..base.errors import BackendError, Timeout
from .sockets import peer_lost, peer_pid

_HEADER = struct.Struct("<4sIQ")  # kind, sequence number, bytes that follow
_FD_BYTES = array.array("i").itemsize


class _Link:
    """The stream to one peer, with the bytes and descriptors that are received but not yet used."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.received = bytearray()
        self.fds: list[int] = []
        self.is_open = True

    def fill(self) -> None:
        """Receives what has arrived. Sets `is_open` to False if the stream has ended."""
        while self.is_open:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(
                    1 << 16, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            for _, _, payload in ancillary:
                self.fds.extend(array.array("i", payload[: len(payload) // _FD_BYTES * _FD_BYTES]))
            self.received += data
            self.is_open = len(data) > 0

    def take(self) -> tuple[bytes, int, bytes] | None:
        """The next complete message as (kind, sequence number, payload); None if there is none."""
        if len(self.received) < _HEADER.size:
            return None
        kind, sequence, length = _HEADER.unpack_from(self.received)
        end = _HEADER.size + length
        if len(self.received) < end:
            return None
        payload = bytes(self.received[_HEADER.size : end])
        del self.received[:end]
        return kind, sequence, payload

    def drop_fds(self) -> None:
        """Closes the descriptors that are received but not used."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class Mesh:
    """The connected ranks of a communicator.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        pidfds: Peer -> descriptor of its process; -1 if it is a thread of this process.
    """

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._links = {peer: _Link(connection) for peer, connection in sockets.items()}
        self._sequence = 0
        self._round = 0
        # State of reset(): the phase this rank is in, the last phase that each peer announced, and
        # the last phase that is complete.
        self._phase = 0
        self._heard = dict.fromkeys(self._links, 0)
        self._completed = 0
        self.pidfds = dict.fromkeys(self._links, -1)
        try:
            for peer, link in self._links.items():
                self.pidfds[peer] = self._open_pidfd(peer, link.socket)
        except BaseException:
            self.close()
            raise

    def part(
        self, rank: int, members: list[int], name: str, sockets: dict[int, socket.socket]
    ) -> "Mesh":
        """A new mesh for some of the ranks. Not collective.

        Args:
            rank: This rank's number in the new mesh.
            members: The new mesh's ranks by their numbers in this mesh, in the new order.
            name: A unique name for the new mesh, the same on all members.
            sockets: The new mesh's connections, by rank in it.
        """
        return Mesh(rank, len(members), sockets)

    def _open_pidfd(self, peer: int, connection: socket.socket) -> int:
        pid = peer_pid(connection)
        if pid == os.getpid():
            return -1
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            raise peer_lost(self.rank, peer, "start-up") from None
        except OSError as error:
            raise BackendError(f"pidfd_open({pid}) failed: {error}") from error

    def allgather(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        """Every rank's payload, in rank order. Collective.

        Args:
            payload: Any bytes. Lengths may differ between ranks.
            what: What the ranks are doing, for error messages.
            timeout: Seconds to wait for the slowest rank.

        Raises:
            Timeout: A rank did not take part in time.
            PeerLost: A rank is gone.
        """
        got = self._exchange(b"data", self._next(), payload, what, timeout, self._links)
        self._check_complete(got, what)
        return [payload if rank == self.rank else got[rank] for rank in range(self.world_size)]

    def exchange_fds(self, fd: int, what: str, timeout: float) -> list[int]:
        """Sends `fd` to every rank, and returns one descriptor from each rank. Collective.

        The caller closes them. The descriptor at its own rank is a duplicate of `fd`.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.allgather(b"", what, timeout)
        for peer, link in self._links.items():
            # All peers have just answered, so the socket's buffer has room and this cannot block.
            try:
                link.socket.sendmsg([_HEADER.pack(b"fd  ", self._sequence, 0)], ancillary)
            except ConnectionError:
                raise peer_lost(self.rank, peer, what) from None
        self._exchange(b"fd  ", self._next(), None, what, timeout, self._links)
        fds = []
        for rank in range(self.world_size):
            if rank == self.rank:
                fds.append(os.dup(fd))
                continue
            if not self._links[rank].fds:
                for received in fds:
                    os.close(received)
                raise peer_lost(self.rank, rank, what)
            fds.append(self._links[rank].fds.pop(0))
        return fds

    def agree_on_survivors(self, payload: bytes, timeout: float) -> dict[int, bytes]:
        """The ranks that are alive, with their payloads. Collective among them.

        The result is the same on each of them. In each round every rank tells the others which
        ranks it hears. The rounds end when all ranks that hear each other have the same list.

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

    @property
    def is_resetting(self) -> bool:
        """True after a reset() that has begun and failed. reset() may be called again."""
        return self._phase != self._completed

    def reset(self, clear: Callable[[], None], timeout: float) -> None:
        """Drops unfinished exchanges, and calls `clear` while no rank is in a call. Collective.

        While `is_resetting` holds, this rank must not call anything but reset() and shrink().

        Raises:
            Timeout: A rank did not take part in time. The next reset() goes on where this one
                stopped.
            PeerLost: A rank is gone.
        """
        # Reset number g has two phases. In phase 2g - 1 a rank announces: "I make no call before
        # reset g is complete." In phase 2g it adds: "I have cleared my memory for reset g."
        # This also holds when a rank times out and calls reset() again:
        # - Both announcements stay true until the rank has completed reset g. So each needs to be
        #   heard once only (`_heard`), however old it is. A rank that timed out stays in its phase.
        # - No rank clears before all have announced phase 2g - 1, so no call is in flight then.
        # - No rank clears twice in reset g, and none goes on before all have announced phase 2g.
        #   So nobody wipes what a rank writes after its reset.
        # - A rank that is late in phase 2g may find others in reset g + 1. A later announcement
        #   includes the earlier ones.
        if not self.is_resetting:
            self._phase += 1
        if self._phase % 2 == 1:
            self._announce_phase(timeout)
            for link in self._links.values():
                link.drop_fds()
            clear()
            self._phase += 1
        self._announce_phase(timeout)
        # Streams are read in order. What was sent before phase 2g has been read and dropped, so all
        # ranks may count from 0 again.
        self._sequence = 0
        self._completed = self._phase

    def _announce_phase(self, timeout: float) -> None:
        """Announces this rank's phase, and waits until all peers have announced it."""
        got = self._exchange(b"rset", self._phase, b"", "reset", timeout, self._links)
        self._check_complete(got, "reset")

    def _check_complete(self, got: dict[int, bytes], what: str) -> None:
        lost = sorted(set(self._links) - set(got))
        if lost:
            raise peer_lost(self.rank, lost[0], what)

    def hang_up(self) -> None:
        """Ends this rank's and the peers' waits on these streams. Any thread may call it."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # closed already
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this rank's streams. Idempotent, not collective."""
        for peer, link in self._links.items():
            link.socket.close()
            link.is_open = False
            link.drop_fds()
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
        """Sends `payload`, unless it is None, and receives one message from each open link.

        Returns:
            Peer -> payload, for the peers whose message came before their stream ended.
        """
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
                        self._take(link, peer, kind, sequence, what, got)
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
        self,
        link: _Link,
        peer: int,
        kind: bytes,
        sequence: int,
        what: str,
        got: dict[int, bytes],
    ) -> None:
        """Moves the peer's message of this exchange into `got`, if it has arrived."""
        while True:
            if kind == b"rset" and self._heard[peer] >= sequence:
                got[peer] = b""
                return
            if kind in (b"data", b"fd  ") and self._heard[peer] > self._phase:
                raise Timeout(
                    f"rank {peer} called reset() and will not answer rank {self.rank} during "
                    f"{what}; all ranks may go on after comm.reset()",
                    rank=self.rank,
                    peer=peer,
                    collective=what,
                )
            message = link.take()
            if message is None:
                return
            seen_kind, seen_sequence, payload = message
            if seen_kind == b"rset":
                # A phase is announced once, so it counts whatever this rank is doing now.
                self._heard[peer] = max(self._heard[peer], seen_sequence)
                continue
            if (seen_kind, seen_sequence) == (kind, sequence):
                got[peer] = payload
                return
            # After a failure the streams may hold messages of unfinished exchanges. A message with
            # an earlier number is one: this rank left that exchange without the peer's message.
            is_earlier = (seen_sequence - sequence) & 0xFFFFFFFF >= 1 << 31
            if seen_kind == b"live" and kind != b"live":
                # The peer is in shrink() and takes no more part in this exchange. Its message is
                # kept for this rank's own shrink().
                link.received[:0] = _HEADER.pack(*message[:2], len(payload)) + payload
                view = payload[1 : 1 + payload[0]]
                absent = sorted(set(range(self.world_size)) - set(view))
                raise peer_lost(self.rank, absent[0] if absent else peer, what)
            if kind in (b"live", b"rset") or is_earlier:
                continue
            raise BackendError(
                f"rank {self.rank} is in out-of-band exchange {sequence} and rank {peer} in "
                f"exchange {seen_sequence}: all ranks must make the same collective calls in the "
                "same order"
            )
