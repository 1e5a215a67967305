"""The out-of-band connection of a communicator's ranks: a Unix socket between each two ranks.

The sockets carry what is rare and may be slow: names, memory handles (as SCM_RIGHTS), agreement
after a failure. A waiting rank sleeps. When a rank's process ends, its peers see the end of its
connection. sockets.py makes the connections, link.py says what a message is, exchanges.py what a
call is.
"""

import contextlib
import os
import select
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from ..base.errors import BackendError
from . import nodes, sockets
from .exchanges import Exchanges
from .link import LEFT, LIVE, RESET, Link
from .messages import drop
from .processes import pidfd_of
from .sockets import peer_lost, peer_pid

# Why a rank has left: texts of LEFT messages (link.py) to the peers.
_CLOSED = "it has closed the communicator"
_DROPPED = "its program has dropped the communicator without close()"


class Closable(Protocol):
    """An object with a close() method, as a communicator."""

    def close(self) -> None:
        """Ends the use of the object."""


def _release(links: dict[int, Link], pidfds: dict[int, int], pid: int, why: str = _DROPPED) -> None:
    """Closes a mesh's descriptors.

    Args:
        links, pidfds: The mesh's links and pidfds, by peer.
        pid: The rank's process. A fork of it has the same connections and must not write to them.
        why: What the peers are told.
    """
    for peer, link in links.items():
        if os.getpid() == pid:
            link.put(LEFT, 0, why.encode())
        link.close()
        pidfd, pidfds[peer] = pidfds[peer], -1
        if pidfd >= 0:
            os.close(pidfd)


class Mesh(Exchanges):
    """The connected ranks of a communicator. Exchanges has more attributes.

    Attributes:
        pidfds: Peer -> pidfd of its process; -1 for a thread of this process or a rank of another
            node. Where the system forbids pidfds, a duplicate of the connection's descriptor.
        end_event: The event that poll() reports for a descriptor in `pidfds` when the peer's
            process has ended.
        has_hung_up: hang_up() was called, so this rank receives nothing more from its peers.
        homes: The node of each rank, in rank order; () if all are on one node.
        numbers: Each rank's number in the mesh whose part() made this one; if none did, its rank.
        unfinished: A shrink() that has begun and not returned; None if there is none. close()
            closes it too.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connections: dict[int, socket.socket],
        homes: tuple[nodes.Home, ...] = (),
    ) -> None:
        links = {peer: Link(connection) for peer, connection in connections.items()}
        self.homes = homes
        super().__init__(rank, world_size, links)
        self.numbers = list(range(world_size))
        self.has_hung_up = False
        self._pid = os.getpid()
        self.unfinished: Closable | None = None
        # The value of _phase when the last reset() succeeded; see reset().
        self._completed = 0
        self.pidfds = dict.fromkeys(self._links, -1)
        self.end_event: int = select.POLLIN
        # The finalizer closes the sockets of a communicator that is dropped without close(). The
        # garbage collector may run it in any thread, so _release() must not wait.
        self._release = weakref.finalize(self, _release, links, self.pidfds, self._pid)
        self._release.atexit = False
        try:
            # All ranks make this call first, so it has the same number on all of them.
            with self.call("start-up"):
                for peer, link in links.items():
                    self.pidfds[peer] = self._open_pidfd(peer, link.socket)
        except BaseException:
            self.close()
            raise
        self._number = 0

    def part(
        self, rank: int, members: list[int], name: str, connections: dict[int, socket.socket]
    ) -> "Mesh":
        """Returns a new mesh for some of the ranks. Not collective.

        Args:
            rank: This rank's number in the new mesh.
            members: The new mesh's ranks by their numbers in this mesh, in the new order.
            name: A unique name for the new mesh, the same on all members.
            connections: The new mesh's connections, by rank in it.
        """
        homes = tuple(self.homes[member] for member in members) if self.homes else ()
        if len({home.node for home in homes}) == 1:
            homes = ()
        part = Mesh(rank, len(members), connections, homes)
        part.numbers = members
        return part

    def listen(self) -> "tuple[socket.socket | nodes.Listener, str]":
        """Returns a listener to which members of a part of this mesh may connect, and its name."""
        listener, name = sockets.listen()
        if not self.homes:
            return listener, name
        far = nodes.Listener(listener, name, self.homes[self.rank].node)
        return far, far.name

    def _open_pidfd(self, peer: int, connection: socket.socket) -> int:
        if connection.family != socket.AF_UNIX:
            # A rank of another node has no process on this one. It needs no descriptor either,
            # because waits on windows, which watch processes, are only for ranks of this node.
            return -1
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
        # Without pidfds the end of the connection shows that the process has ended. Waits poll for
        # POLLRDHUP, because POLLIN would also report messages.
        self.end_event = select.POLLRDHUP
        return os.dup(connection.fileno())

    def socket_of(self, peer: int) -> int:
        """Returns the descriptor of a peer's connection, which ends with the peer's process or with
        the peer's close().
        """
        return self._links[peer].socket.fileno()

    # ---- For shrink(), see survivors.py --------------------------------------------------------

    def tell(self, payload: bytes) -> None:
        """Sends a message of shrink() to all peers, without waiting: the rest goes out later."""
        for link in self._links.values():
            link.put(LIVE, 0, payload)

    def hear(self) -> Iterator[tuple[int, bytes]]:
        """Returns the messages of shrink() that have arrived: peer and payload. Does not wait."""
        for peer, link in self._links.items():
            link.fill()
            while (message := link.take()) is not None:
                kind, sequence, payload = message
                if kind == LIVE:
                    yield peer, payload
                elif kind == RESET:
                    self._heard[peer] = max(self._heard[peer], sequence)
                else:
                    # The message belongs to an exchange, which no rank will finish after shrink().
                    drop(kind, payload)

    def ended(self) -> frozenset[int]:
        """Returns the peers whose connections have ended. All their messages have been received."""
        return frozenset(peer for peer, link in self._links.items() if not link.is_open)

    def is_flushed(self) -> bool:
        """Tells whether the sockets have taken all messages of this rank."""
        return not any(link.unsent for link in self._links.values())

    def wait(self, number: int, until: Callable[[], bool], deadline: float) -> bool:
        """Sends and receives until `until()`. Returns False at the deadline.

        Args:
            number: The number of this wait in shrink(): the same on all ranks that wait for each
                other.
            until: Called first, and after each poll of the connections.
            deadline: A value of clock.now().
        """
        with self._meeting(LIVE, number):
            return self._pump(until, deadline)

    # ---- reset() -----------------------------------------------------------------------------

    @property
    def is_resetting(self) -> bool:
        """Tells whether a reset() has begun and failed. reset() may be called again."""
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
            clear()
            self._phase += 1
        self._announce_phase(timeout)
        # Sockets are read in order. What was sent before phase 2g has been read and dropped, so all
        # ranks may count from 0 again.
        self._number = 0
        self.has_met = False
        self._seen_in.clear()
        self._completed = self._phase

    def _announce_phase(self, timeout: float) -> None:
        """Announces this rank's phase, and waits until all peers have announced it."""
        got = self._exchange(RESET, self._phase, b"", "reset", timeout, self._links)
        self._check_complete(got, "reset", self._links)

    # ---- The end -----------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Ends this rank's and the peers' waits on these connections. Any thread may call it."""
        self.has_hung_up = True
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the connection may be closed already
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this rank's connections. Idempotent, not collective."""
        unfinished, self.unfinished = self.unfinished, None
        if unfinished is not None:
            unfinished.close()
        if self._release.detach() is not None:
            _release(self._links, self.pidfds, self._pid, _CLOSED)

    def drop(self) -> None:
        """Closes this rank's connections, for a communicator that is collected without close()."""
        self._release()
