"""The out-of-band connection of a communicator's ranks: a Unix socket between each two ranks.

It carries what is rare and may be slow: names, memory handles (as SCM_RIGHTS), agreement after a
failure. A waiting rank sleeps. When a rank's process ends, its peers see the end of its stream.
sockets.py makes the connections, and link.py says what a message is.
"""

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from ..base.errors import BackendError, Timeout
from .link import LOST, Link
from .processes import pidfd_of
from .sockets import peer_lost, peer_pid, poll_ms


class Closable(Protocol):
    """An object with a close() method, as a communicator."""

    def close(self) -> None:
        """Ends the use of the object."""


def _release(links: dict[int, Link], pidfds: dict[int, int]) -> None:
    """Closes a mesh's descriptors."""
    for peer, link in links.items():
        link.close()
        pidfd, pidfds[peer] = pidfds[peer], -1
        if pidfd >= 0:
            os.close(pidfd)


class Mesh:
    """The connected ranks of a communicator.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        pidfds: Peer -> descriptor of its process; -1 if it is a thread of this process. Where the
            system forbids those, a descriptor of its stream, which ends with the process.
        end_event: What poll() reports of such a descriptor when the process has ended.
        has_hung_up: hang_up() was called, so this rank hears none of its peers.
        unfinished: What close() closes too: the agreement of a shrink() that has begun.
    """

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._links = {peer: Link(connection) for peer, connection in sockets.items()}
        self._sequence = 0
        self.has_hung_up = False
        self.unfinished: Closable | None = None
        # State of reset(): the phase this rank is in, the last phase that each peer announced, and
        # the last phase that is complete.
        self._phase = 0
        self._heard = dict.fromkeys(self._links, 0)
        self._completed = 0
        self.pidfds = dict.fromkeys(self._links, -1)
        self.end_event: int = select.POLLIN
        # Also when a communicator is dropped without close() and nothing uses the mesh. Any
        # thread may collect it, so this must not wait.
        self._release = weakref.finalize(self, _release, self._links, self.pidfds)
        self._release.atexit = False
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
            pidfd = pidfd_of(pid)
        except ProcessLookupError:
            raise peer_lost(self.rank, peer, "start-up") from None
        except OSError as error:
            raise BackendError(f"pidfd_open({pid}) failed: {error}") from error
        if pidfd is not None:
            return pidfd
        # Messages arrive on the stream, so its being readable says nothing.
        self.end_event = select.POLLRDHUP
        return os.dup(connection.fileno())

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
        got = self._exchange(b"data", self._next(), payload, what, timeout)
        self._check_complete(got, what)
        return [payload if rank == self.rank else got[rank] for rank in range(self.world_size)]

    def exchange_fds(self, fd: int, what: str, timeout: float) -> list[int]:
        """Sends `fd` to every rank, and returns one descriptor from each rank. Collective.

        The caller closes them. The descriptor at its own rank is a duplicate of `fd`.
        """
        self.allgather(b"", what, timeout)
        for peer, link in self._links.items():
            # All peers have just answered, so the socket's buffer has room and this cannot block.
            try:
                link.put_fd(b"fd  ", self._sequence, fd)
            except ConnectionError:
                raise peer_lost(self.rank, peer, what) from None
        self._exchange(b"fd  ", self._next(), None, what, timeout)
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

    # ---- For shrink(), see survivors.py --------------------------------------------------------

    def tell(self, payload: bytes) -> None:
        """Sends a message of shrink() to all peers, as far as their sockets take it now."""
        for link in self._links.values():
            link.put(b"live", 0, payload)

    def hear(self) -> Iterator[tuple[int, bytes]]:
        """The messages of shrink() that have arrived: peer and payload. Does not wait."""
        for peer, link in self._links.items():
            link.fill()
            while (message := link.take()) is not None:
                kind, sequence, payload = message
                if kind == b"live":
                    yield peer, payload
                elif kind == b"rset":
                    self._heard[peer] = max(self._heard[peer], sequence)
                # The rest belongs to exchanges that nobody finishes.

    def ended(self) -> frozenset[int]:
        """The peers whose streams have ended; all that they sent has been received."""
        return frozenset(peer for peer, link in self._links.items() if not link.is_open)

    def is_flushed(self) -> bool:
        """Whether the sockets have taken all that this rank has sent."""
        return not any(link.unsent for link in self._links.values())

    def wait(self, number: int, until: Callable[[], bool], deadline: float) -> bool:
        """Sends and receives until `until()`. Returns False at the deadline.

        Args:
            number: Of this wait in shrink(), the same on all ranks that wait for each other.
            until: Called first, and whenever something has come or gone.
            deadline: A value of time.monotonic().
        """
        with self._meeting(b"live", number):
            return self._pump(until, deadline)

    # ---- reset() -----------------------------------------------------------------------------

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
        got = self._exchange(b"rset", self._phase, b"", "reset", timeout)
        self._check_complete(got, "reset")

    def _check_complete(self, got: dict[int, bytes], what: str) -> None:
        lost = sorted(set(self._links) - set(got))
        if lost:
            raise peer_lost(self.rank, lost[0], what)

    # ---- The end -----------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Ends this rank's and the peers' waits on these streams. Any thread may call it."""
        self.has_hung_up = True
        for link in self._links.values():
            with contextlib.suppress(OSError):  # closed already
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this rank's streams. Idempotent, not collective."""
        unfinished, self.unfinished = self.unfinished, None
        if unfinished is not None:
            unfinished.close()
        self._release()

    # ---- Exchanges ---------------------------------------------------------------------------

    def _next(self) -> int:
        sequence = self._sequence
        self._sequence = (sequence + 1) & 0xFFFFFFFF
        return sequence

    def _meeting(self, kind: bytes, number: int) -> AbstractContextManager[None]:
        """The context of a wait for all peers whose streams are open."""
        return contextlib.nullcontext()

    def _exchange(
        self, kind: bytes, sequence: int, payload: bytes | None, what: str, timeout: float
    ) -> dict[int, bytes]:
        """Sends `payload`, unless it is None, and receives one message from each peer.

        Returns:
            Peer -> payload, for the peers whose message came before their stream ended.
        """
        got: dict[int, bytes] = {}

        def is_late(peer: int, link: Link) -> bool:
            return link.is_open and (peer not in got or len(link.unsent) > 0)

        def is_done() -> bool:
            for peer, link in self._links.items():
                if peer not in got:
                    self._take(link, peer, kind, sequence, what, got)
            return not any(is_late(peer, link) for peer, link in self._links.items())

        deadline = time.monotonic() + timeout
        with self._meeting(kind, sequence):
            if payload is not None:
                for link in self._links.values():
                    link.put(kind, sequence, payload)
            if self._pump(is_done, deadline):
                return got
            late = next(peer for peer, link in self._links.items() if is_late(peer, link))
            raise Timeout(
                f"rank {self.rank} waited {timeout:.3g} s for rank {late} during {what}",
                rank=self.rank,
                peer=late,
                collective=what,
                waited_s=timeout,
            )

    def _pump(self, until: Callable[[], bool], deadline: float) -> bool:
        """Sends and receives until `until()`. Returns False at the deadline."""
        while not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            links = {link.socket.fileno(): link for link in self._links.values() if link.is_open}
            poll = select.poll()
            for fd, link in links.items():
                poll.register(fd, select.POLLIN | (select.POLLOUT if link.unsent else 0))
            for fd, events in poll.poll(poll_ms(remaining)):
                if events & ~select.POLLOUT:
                    links[fd].fill()
                links[fd].flush()
        return True

    def _take(
        self,
        link: Link,
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
            if seen_kind == b"live":
                # The peer is in shrink() and takes no more part in this exchange. Its message is
                # kept for this rank's own shrink().
                link.put_back(*message)
                # survivors.py imports this module.
                from .survivors import ended_in

                ended = ended_in(payload)
                raise peer_lost(self.rank, min(ended, default=peer), what)
            if seen_kind == LOST:
                raise peer_lost(self.rank, seen_sequence, what)
            if kind == b"rset" or is_earlier:
                continue
            raise BackendError(
                f"rank {self.rank} is in out-of-band exchange {sequence} and rank {peer} in "
                f"exchange {seen_sequence}: all ranks must make the same collective calls in the "
                "same order"
            )
