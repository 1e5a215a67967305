"""Connects ranks: those of one node by Unix sockets, those of different nodes by TCP (nodes.py).

The sockets' names are in the abstract namespace, so a killed rank leaves nothing behind.
"""

import contextlib
import json
import math
import os
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial

from ..base import clock
from ..base.errors import BackendError, Error, PeerLost, Timeout, WaitFailed
from ..base.syscalls import allowed
from . import nodes
from .dialing import dial, new_socket
from .link import FAIL, HEADER, LOST, START_UP
from .messages import own_failure, peers_failure, reason_of
from .processes import is_running

_UCRED = struct.Struct("3i")
_POLL_S = 0.02  # seconds between two checks whether the missing ranks' processes still run
# Seconds that a rank which gives up waits for ranks that have yet to connect, to tell them why.
_LAST_WORD_S = 3.0
_MOST_REASON_BYTES = 4000


def listen() -> tuple[socket.socket, str]:
    """Returns a listening socket, and the name that connect() takes."""
    # The name has the process id, so a waiting peer can see whether this process has ended.
    name = f"kccl-{os.getpid()}-{os.urandom(16).hex()}"
    return bind(name), name


def bind(name: str) -> socket.socket:
    """Returns a socket that listens under `name`. Raises OSError when the name is taken."""
    listener = new_socket()
    try:
        with allowed("bind"):
            listener.bind(f"\0{name}")
        with allowed("listen"):
            listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def peer_pid(connection: socket.socket) -> int:
    """Returns the process id at the other end of a Unix socket's connection.

    Raises:
        BackendError: That process belongs to another user.
    """
    with allowed("getsockopt"):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    if uid != os.getuid():
        raise BackendError(
            f"the process at the other end is of user {uid}, must be of user {os.getuid()}"
        )
    return int(pid)


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Reads exactly `num_bytes` from a blocking socket.

    Raises:
        TimeoutError: The bytes did not come before `deadline`, a value of clock.now().
        ConnectionError: The connection ended first.
    """
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(clock.left(deadline), 0.001))
        try:
            more = connection.recv(num_bytes - len(data))
        except TimeoutError:
            if clock.now() < deadline:
                continue
            raise
        if not more:
            raise ConnectionResetError("the connection ended")
        data += more
    return data


def poll_ms(seconds: float) -> int:
    """Returns the milliseconds that poll() may wait: `seconds`, but at most clock.LOOK_S. They are
    rounded up, so that poll() does not return just before the time is up.
    """
    return math.ceil(min(max(seconds, 0), clock.LOOK_S) * 1000)


def connect(
    rank: int,
    names: list[str],
    listener: "socket.socket | nodes.Listener",
    deadline: float,
    *,
    what: str = "start-up",
    numbers: Sequence[int] = (),
    look: Callable[[], None] = lambda: None,
) -> dict[int, socket.socket]:
    """Connects this rank with every other one. Collective.

    Args:
        rank: This rank.
        names: Name of each rank's listener, in rank order.
        listener: This rank's listener. It is closed.
        deadline: A value of clock.now().
        what: What the ranks are doing, for error messages.
        numbers: The numbers of the ranks in error messages; () for 0, 1, ...
        look: Called now and then during the wait. What it raises ends the wait.

    Returns:
        One connected socket for each peer.

    Raises:
        Timeout: A rank did not connect before the deadline.
        PeerLost: A rank's process has ended.
        Error: Another rank could not connect. The text has its number and the reason.
    """
    numbers = numbers or range(len(names))
    sockets: dict[int, socket.socket] = {}
    unknown: list[socket.socket] = []  # an accepted connection whose rank is not known yet
    told = 0, b""  # what a peer sent: which rank could not connect, and the message; b"": nothing

    def may_run(name: str) -> bool:
        """Returns False if the rank's process has ended. Ranks of other nodes count as alive,
        because this node cannot see their processes.
        """
        return _is_far(name, names[rank]) or is_running(_pid_in(name))

    def lost(peer: int) -> PeerLost:
        return peer_lost(numbers[rank], numbers[peer], what)

    def late_error(peer: int) -> Timeout:
        late = numbers[peer]
        return Timeout(
            f"rank {late} did not connect to rank {numbers[rank]} in time during {what}",
            rank=numbers[rank],
            peer=late,
            collective=what,
        )

    def check_others(refuser: int | None = None) -> None:
        """Raises if a connected peer has told of a loss or a failure. If `refuser` has refused to
        connect, also raises if a connected peer has ended without a message.
        """
        nonlocal told
        for connection in sockets.values():
            kind, culprit, reason = _last_word_of(connection)
            if kind == LOST:
                raise lost(culprit)
            if kind == FAIL:
                source, error = peers_failure(reason, numbers[rank], what)
                told = numbers.index(source), _failure(reason)
                raise error
        for peer, connection in sockets.items():
            if refuser is not None and peer != refuser and has_ended(connection):
                raise lost(peer)

    def check(absent: set[int]) -> None:
        """Raises if one of the absent peers will not come."""
        look()
        # A connected peer may be lost too. The absent ones may know it already and never come.
        ended = [peer for peer in (*sockets, *absent) if not may_run(names[peer])]
        ended += [peer for peer, connection in sockets.items() if has_ended(connection)]
        # Messages are read after that, because a peer that gives up sends why before it ends.
        check_others()
        if ended:
            raise lost(ended[0])
        if clock.now() > deadline:
            raise late_error(min(absent))

    def check_reached(peer: int) -> None:
        look()
        check_others()
        if clock.now() > deadline:
            raise late_error(peer)

    try:
        for peer in range(rank):
            try:
                check_peer = partial(check_reached, peer)
                sockets[peer] = connection = _reach(names[peer], names[rank], check_peer)
                connection.sendall(struct.pack("<I", rank))
            except Error:
                raise
            except ConnectionError:
                check_others(refuser=peer)
                raise lost(peer) from None
        absent = set(range(rank + 1, len(names)))
        listener.settimeout(_POLL_S)
        while absent:
            try:
                with allowed("accept"):
                    connection, _ = listener.accept()
            except TimeoutError:
                check(absent)
                continue
            unknown = [connection]
            found = _rank_of(connection, deadline)
            unknown = []
            if found in absent:
                sockets[found] = connection
                absent.remove(found)
            else:
                # Another user's process, or a rank that has ended, which check() will see.
                connection.close()
        check_others()
    except BaseException as error:
        mine = error
        culprit, message = told
        # A message that is not empty is a peer's, about a failure. It is passed on, because the
        # peer cannot reach ranks that have not connected to it.
        if not message and isinstance(error, PeerLost) and error.peer in numbers:
            culprit = numbers.index(error.peer)
            message = HEADER.pack(LOST, culprit, 0)
        elif not message and not isinstance(error, WaitFailed):
            mine = own_failure(error, numbers[rank], what)
            culprit, message = rank, _failure(reason_of(mine, numbers[rank]))
        if message:
            _tell_all(rank, names, sockets, unknown, listener, culprit, message, deadline)
        for connection in (*sockets.values(), *unknown):
            connection.close()
        if mine is error:
            raise
        raise mine from error
    finally:
        listener.close()
    return sockets


def _is_far(name: str, mine: str) -> bool:
    """Tells whether the rank that listens under a name is on another node than this one."""
    return nodes.node_in(name) != nodes.node_in(mine)


def _reach(name: str, mine: str, look: Callable[[], None]) -> socket.socket:
    """Connects with the rank that listens under a name; `look` as in nodes.connect()."""
    if _is_far(name, mine):
        return nodes.connect(name, look)
    connection = new_socket()
    try:
        dial(connection, nodes.nearby(name))
        peer_pid(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _failure(reason: bytes) -> bytes:
    """Returns the FAIL message of a rank that could not connect. reason_of() made `reason`."""
    if len(reason) > _MOST_REASON_BYTES:
        source, kind, text, peer = json.loads(reason)
        # A character takes at most 12 bytes of JSON, so the text is at most half of the reason.
        text = text[: _MOST_REASON_BYTES // 24] + "..."
        reason = json.dumps([source, kind, text, peer]).encode()
    # With START_UP, a peer whose connect() has returned takes this as a failure of its first call.
    return HEADER.pack(FAIL, START_UP, len(reason)) + reason


def _last_word_of(connection: socket.socket) -> tuple[bytes, int, bytes]:
    """Returns the kind, number and data of the LOST or FAIL that a peer has sent; a kind of b"" if
    it has sent none.
    """
    try:
        most = HEADER.size + _MOST_REASON_BYTES
        said = connection.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b"", 0, b""
    if len(said) < HEADER.size:
        return b"", 0, b""
    kind, number, nbytes = HEADER.unpack_from(said)
    data = said[HEADER.size : HEADER.size + nbytes]
    is_last = kind in (LOST, FAIL) and len(data) == nbytes
    return (kind, int(number), data) if is_last else (b"", 0, b"")


def _tell_all(
    rank: int,
    names: list[str],
    sockets: dict[int, socket.socket],
    unknown: list[socket.socket],
    listener: "socket.socket | nodes.Listener",
    culprit: int,
    message: bytes,
    deadline: float,
) -> None:
    """Tells the others why this rank gives up, and closes its connections.

    Args:
        rank: This rank.
        names: Name of each rank's listener, in rank order.
        sockets: The connections with ranks.
        unknown: Other connections.
        listener: This rank's listener.
        culprit: The rank that is lost, or that could not connect.
        message: The LOST or FAIL message.
        deadline: A value of clock.now(), up to which the others wait.
    """
    connected = {*sockets}
    for connection in (*sockets.values(), *unknown):
        with contextlib.suppress(OSError):  # the peer may have gone, too
            connection.send(message, socket.MSG_DONTWAIT)
        # Closes the connection now: the process may have no other descriptor for the connections
        # below.
        connection.close()
    if culprit == rank:
        # The ranks below this one wait for it to connect.
        for peer in set(range(rank)) - connected:
            with (
                contextlib.suppress(OSError, Error),
                _reach(names[peer], names[rank], lambda: None) as connection,
            ):
                connection.sendall(struct.pack("<I", rank) + message)
    # Each rank connects to lower ranks in order. If a lost rank is below this one, a rank above
    # tries the lost rank first and is refused. But a rank that failed may not have told the ranks
    # above.
    if culprit >= rank or not message.startswith(LOST):
        late = set(range(rank + 1, len(names))) - {culprit, *connected}
        near = {peer: names[peer] for peer in late if not _is_far(names[peer], names[rank])}
        _tell_late(listener, near, message, min(deadline, clock.now() + _LAST_WORD_S))


def _tell_late(
    listener: "socket.socket | nodes.Listener",
    late: dict[int, str],
    message: bytes,
    deadline: float,
) -> None:
    """Tells the ranks that have yet to connect to this one why it gives up.

    A rank that is refused takes the refuser for lost. Ranks above this one connect here before they
    connect to a lost rank that is above this one too, so they must not be refused here.

    Args:
        listener: This rank's listener.
        late: The ranks that have yet to connect -> the names of their listeners.
        message: The LOST or FAIL message.
        deadline: A value of clock.now(), at which this rank waits no longer.
    """
    listener.settimeout(_POLL_S)
    while any(is_running(_pid_in(name)) for name in late.values()):
        if clock.now() > deadline:
            return
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if late.pop(_rank_of(connection, deadline), None) is not None:
                    connection.send(message, socket.MSG_DONTWAIT)


def _rank_of(connection: socket.socket, deadline: float) -> int:
    """Returns the rank that the other end of a new connection sends; -1 if it sends none, or is a
    process of another user.
    """
    try:
        if connection.family == socket.AF_UNIX:
            peer_pid(connection)
        (peer,) = struct.unpack("<I", receive(connection, 4, deadline))
        # With a timeout, Python waits in recv() in spite of MSG_DONTWAIT, which has_ended() uses.
        connection.settimeout(None)
    except (BackendError, ConnectionError, TimeoutError):
        return -1
    return int(peer)


def _pid_in(name: str) -> int:
    return int(name.split("-")[1])


def has_ended(connection: socket.socket) -> bool:
    """Tells whether the other end has closed the connection and all its messages have been read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def peer_lost(
    rank: int, peer: int, what: str, why: str = "its process has ended or given up"
) -> PeerLost:
    """Returns the exception of `rank`, which lost `peer` during `what`."""
    # At start-up there is no communicator yet that could be shrunk.
    cure = "" if what == "start-up" else "; the survivors may go on with comm.shrink()"
    return PeerLost(
        f"rank {rank} lost rank {peer} during {what}: {why}{cure}",
        rank=rank,
        peer=peer,
        collective=what,
    )
