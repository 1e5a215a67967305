"""Exchanges of messages between the ranks of a communicator, and the calls that they are part of.

A call is what all ranks make together: split(), window(), start-up. Calls are numbered, and so are
the exchanges within a call. Each message has both numbers and the name of the call. So ranks that
make different calls get an error that names both calls. All ranks can go on with their next call,
because a call has the same number on all of them however it ended.

A call succeeds on all ranks or on none: a rank on which it fails tells all others why, and a rank
returns only after an exchange in which all others have said that they succeeded. The exception is
this last exchange: if a rank is lost in it, or the time is up, some ranks may return and others
raise.
"""

import contextlib
import errno
import os
import select
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from ..base import clock
from ..base.errors import BackendError, PeerLost, Timeout
from .knowledge import Said
from .link import DATA, FAIL, FD, LEFT, LIVE, LOST, NO_FD, RESET, Link, close_fd
from .messages import (
    disagreement,
    drop,
    named,
    own_failure,
    parts_of,
    peers_failure,
    reason_of,
)
from .sockets import peer_lost, poll_ms

# Seconds that hear_reason() waits for a peer to tell why it has failed.
_REASON_S = 1.0
_MOST = 1 << 32


class Exchanges:
    """The calls of one rank, over its connections.

    Attributes:
        rank, world_size: This rank, and the number of ranks.
        has_met: A call other than start-up has succeeded since start-up or reset().
        told_by: The rank that failed in the last call and told this rank why; None if none did.
    """

    def __init__(self, rank: int, world_size: int, links: dict[int, Link]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.has_met = False
        self.told_by: int | None = None
        self._links = links
        self._call = ""  # the name of the call that this rank is in; "" between calls
        self._number = 0  # the call's number, times 256, plus the exchange's number in the call
        # For Mesh.reset(): this rank's phase, and the latest phase that each peer has announced.
        self._phase = 0
        self._heard = dict.fromkeys(links, 0)
        # Peer -> the call to which the peer's last message belonged, as seen while this rank is in
        # reset().
        self._seen_in: dict[int, str] = {}

    # ---- Calls -------------------------------------------------------------------------------

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Returns a context for one call of all ranks. Within another call it is a part of that.

        If the body raises here, all other ranks that are in the call raise too. A body that must
        succeed on all ranks or on none ends with an exchange, as together() does.
        """
        if self._call:
            yield
            return
        self._begin(what)
        try:
            yield
            self.has_met |= what != "start-up"
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if self._is_known:
                # Passes the reason on: a peer may read this rank's message of the next call before
                # it reads the reason on the connection of the rank that failed.
                if self._reason:
                    self._tell_failure(self._reason)
                raise
            mine = own_failure(error, self.rank, what)
            self._tell_failure(reason_of(mine, self.rank))
            if mine is error:
                raise
            raise mine from error
        finally:
            self._call = ""

    @contextmanager
    def together(self, what: str, timeout: float) -> Iterator[ExitStack]:
        """Returns the context of a call() that ends with an exchange: all ranks succeed or none.

        Yields:
            A stack for callbacks. They run if the call fails, on this rank or another one.
        """
        with self.call(what), ExitStack() as undo:
            yield undo
            self.allgather(b"", what, timeout)
            undo.pop_all()

    def _begin(self, what: str) -> None:
        self._call = what
        self._number = ((self._number >> 8) + 1 << 8) % _MOST
        self._is_known = False  # this call has failed, and the others learn of it without this rank
        self._reason = b""  # what the failed rank told; b"" if no rank told this one
        self.told_by = None

    def _tell_failure(self, reason: bytes) -> None:
        """Sends all peers why this call has failed. Does not wait: what a socket does not take now
        stays in Link.unsent.
        """
        for link in self._links.values():
            link.put(FAIL, self._number, reason)

    def look(self) -> None:
        """Raises the error of a peer on which this call has failed, if a message of the peer says
        so. Does not wait.
        """
        for link in self._links.values():
            link.fill()
            while (message := link.take()) is not None:
                kind, number, payload = message
                if kind == FAIL and number >> 8 == self._number >> 8:
                    raise self._told(payload)
                if kind not in (DATA, FD, FAIL) or not self._is_earlier(number):
                    link.put_back(*message)
                    break
                drop(kind, payload)

    def hear_reason(self, peer: int) -> None:
        """Waits up to _REASON_S for the peer's message that says why this call has failed, and
        raises that error. Returns if no such message comes.
        """
        link = self._links[peer]

        def is_over() -> bool:
            self.look()
            return not link.is_open

        self._pump(is_over, clock.now() + _REASON_S)

    def _told(self, reason: bytes) -> Exception:
        self._is_known, self._reason = True, reason
        self.told_by, error = peers_failure(reason, self.rank, self._call)
        return error

    # ---- Exchanges ---------------------------------------------------------------------------

    def allgather(
        self, payload: bytes, what: str, timeout: float, among: Sequence[int] | None = None
    ) -> list[bytes]:
        """Returns every rank's payload, in rank order. Collective. If no call() has begun, this is
        a call of its own.

        Args:
            payload: Any bytes. Lengths may differ between ranks.
            what: What the ranks are doing, for error messages.
            timeout: Seconds to wait for the slowest rank.
            among: The ranks that exchange payloads with this one, itself included, in the order of
                the result; None: all. Within a call every rank must make the same number of
                exchanges, each with its own team.

        Raises:
            InvalidArgument: A rank makes another call.
            Timeout: A rank did not take part in time.
            PeerLost: A rank is gone.
            Error: The call has failed on another rank.
        """
        with self.call(what):
            self._number += 1
            message = named(self._call, payload)
            links = self._links_to(among)
            got = self._exchange(DATA, self._number, message, what, timeout, links)
            self._check_complete(got, what, links)
        members = range(self.world_size) if among is None else among
        return [payload if rank == self.rank else got[rank] for rank in members]

    def exchange_fds(
        self, fd: int, what: str, timeout: float, among: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Sends `fd` to every peer, and returns the descriptor of each peer. Collective.

        The caller must close the returned descriptors. `among` is as in allgather(). Raises what
        allgather() raises, and OSError where the operating system refuses to send or receive a
        descriptor.
        """
        with self.call(what):
            self.allgather(b"", what, timeout, among)
            self._number += 1
            links = self._links_to(among)
            for peer, link in links.items():
                # All peers have just answered, so they have read what this rank sent before, and
                # the socket's buffer has room.
                try:
                    link.put_fd(self._number, named(self._call), fd)
                except ConnectionError:
                    raise peer_lost(self.rank, peer, what) from None
            got = self._exchange(FD, self._number, None, what, timeout, links)
            fds = {peer: int(text) for peer, text in got.items()}
            try:
                self._check_complete(got, what, links)
                if NO_FD in fds.values():
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            except BaseException:
                for each in fds.values():
                    close_fd(each)
                raise
        return fds

    def _links_to(self, among: Sequence[int] | None) -> dict[int, Link]:
        """Returns the connections to the peers in `among`; to all peers if it is None."""
        if among is None:
            return self._links
        return {peer: self._links[peer] for peer in among if peer != self.rank}

    def _check_complete(self, got: dict[int, bytes], what: str, links: Collection[int]) -> None:
        lost = sorted(set(links) - set(got))
        if lost:
            raise peer_lost(self.rank, lost[0], what)

    def _meeting(self, kind: bytes, number: int) -> AbstractContextManager[None]:
        """Returns a context for a wait for all peers whose connections are open. Only the
        simulator's mesh does something in it (kccl/sim/mesh.py).
        """
        return contextlib.nullcontext()

    def _exchange(
        self,
        kind: bytes,
        number: int,
        payload: bytes | None,
        what: str,
        timeout: float,
        links: dict[int, Link],
    ) -> dict[int, bytes]:
        """Sends `payload`, unless it is None, to the peers in `links`, and receives one message of
        each of them.

        Returns:
            Peer -> data, for the peers whose message came before their connection ended.
        """
        got: dict[int, bytes] = {}

        def is_late(peer: int, link: Link) -> bool:
            return link.is_open and (peer not in got or len(link.unsent) > 0)

        def is_done() -> bool:
            for peer, link in links.items():
                if peer not in got:
                    self._take(link, peer, kind, number, what, got)
            return not any(is_late(peer, link) for peer, link in links.items())

        deadline = clock.now() + timeout
        try:
            with self._meeting(kind, number):
                if payload is not None:
                    for link in links.values():
                        link.put(kind, number, payload)
                if self._pump(is_done, deadline):
                    return got
                late = next(peer for peer, link in links.items() if is_late(peer, link))
                where = f", which is in {self._seen_in[late]}" if late in self._seen_in else ""
                raise Timeout(
                    f"rank {self.rank} waited {timeout:.3g} s for rank {late} during {what}{where}",
                    rank=self.rank,
                    peer=late,
                    collective=what,
                    waited_s=timeout,
                )
        except BaseException:
            if kind == FD:
                for text in got.values():
                    close_fd(int(text))
            raise

    def _pump(self, until: Callable[[], bool], deadline: float) -> bool:
        """Sends and receives until `until()`. Returns False at the deadline."""
        while not until():
            remaining = deadline - clock.now()
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

    def _is_earlier(self, number: int) -> bool:
        """Tells whether a message with this sequence number belongs to an earlier call than the one
        that this rank makes. Numbers wrap.
        """
        return ((number >> 8) - (self._number >> 8)) % (_MOST >> 8) >= _MOST >> 9

    def _take(
        self, link: Link, peer: int, kind: bytes, number: int, what: str, got: dict[int, bytes]
    ) -> None:
        """Moves the peer's message of this exchange into `got`, if it has arrived."""
        while True:
            if kind == RESET and self._heard[peer] >= number:
                got[peer] = b""
                return
            if kind != RESET and self._heard[peer] > self._phase:
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
            seen, seen_number, payload = message
            if seen == RESET:
                # A peer announces a phase of reset() only once, so an exchange of any kind keeps
                # the announcement.
                self._heard[peer] = max(self._heard[peer], seen_number)
                continue
            self._check_farewell(link, peer, message, what)
            if kind == RESET:
                if seen in (DATA, FD):
                    self._seen_in[peer] = parts_of(payload)[0]
                drop(seen, payload)
                continue
            # A message of an earlier call, which this rank left before the message came: it is
            # dropped.
            if self._is_earlier(seen_number):
                drop(seen, payload)
                continue
            if seen == FAIL and seen_number >> 8 == number >> 8:
                raise self._told(payload)
            call, data = ("", b"") if seen == FAIL else parts_of(payload)
            if (seen, seen_number, call) == (kind, number, self._call):
                got[peer] = data
                return
            drop(seen, payload)
            if seen_number >> 8 == number >> 8 and call not in ("", self._call):
                self._is_known = True
                raise disagreement({self.rank: self._call, peer: call})
            raise BackendError(
                f"rank {self.rank} waits in {self._call}, and rank {peer} has left it for "
                f"{call or 'a later call'}: all ranks must make the same collective calls in the "
                "same order"
            )

    def _check_farewell(
        self, link: Link, peer: int, message: tuple[bytes, int, bytes], what: str
    ) -> None:
        """Raises if a message says that the peer takes no more part in this exchange."""
        kind, number, payload = message
        if kind == LIVE:
            # This is a message of shrink(): it is kept for this rank's own shrink().
            link.put_back(*message)
            ended = Said.parse(payload).ended
            raise self._known(peer_lost(self.rank, min(ended, default=peer), what))
        if kind == LOST:
            raise self._known(peer_lost(self.rank, number, what))
        if kind == LEFT:
            link.put_back(*message)
            raise self._known(peer_lost(self.rank, peer, what, payload.decode()))

    def _known(self, error: PeerLost) -> PeerLost:
        self._is_known = True
        return error
