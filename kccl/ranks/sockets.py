"""Unix sockets by which the ranks of one machine connect.

Their names are in the abstract namespace, so a killed rank leaves nothing behind.
"""

import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

from ..base.errors import BackendError, PeerLost, Timeout
from .link import HEADER, LOST
from .processes import is_running

_UCRED = struct.Struct("3i")
_POLL_S = 0.02  # between two checks whether the missing ranks' processes still run
# A rank that gives up waits so long for those that have yet to hear why.
_LAST_WORD_S = 1.0
_MOST_POLL_MS = 2**31 - 1


def listen() -> tuple[socket.socket, str]:
    """A listening socket, and the name that connect() takes."""
    # The name has the process id, so a peer that waits for this rank can see that it has ended.
    name = f"kccl-{os.getpid()}-{os.urandom(16).hex()}"
    return bind(name), name


def bind(name: str) -> socket.socket:
    """A socket that listens under `name`. Raises OSError when the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def peer_pid(connection: socket.socket) -> int:
    """Process id at the other end of a connection.

    Raises:
        BackendError: That process belongs to another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    if uid != os.getuid():
        raise BackendError(
            f"the process at the other end is of user {uid}, must be of user {os.getuid()}"
        )
    return int(pid)


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Reads exactly `num_bytes` from a blocking stream.

    Raises:
        TimeoutError: They did not come before `deadline`, a value of time.monotonic().
        ConnectionError: The stream ended first.
    """
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the stream ended")
        data += more
    return data


def poll_ms(seconds: float) -> int:
    """The argument of poll() for a wait of so many seconds; it may be less, but is not 0 then."""
    return min(math.ceil(max(seconds, 0) * 1000), _MOST_POLL_MS)


def connect(
    rank: int,
    names: list[str],
    listener: socket.socket,
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
        deadline: A value of time.monotonic().
        what: What the ranks are doing, for error messages.
        numbers: The numbers of the ranks in error messages; () for 0, 1, ...
        look: Called now and then during the wait. What it raises ends the wait.

    Returns:
        One connected socket for each peer.

    Raises:
        Timeout: A rank did not connect before the deadline.
        PeerLost: A rank's process has ended.
    """
    numbers = numbers or range(len(names))
    sockets: dict[int, socket.socket] = {}

    def lost(peer: int) -> PeerLost:
        return peer_lost(numbers[rank], numbers[peer], what)

    def check_others(refuser: int | None = None) -> None:
        """Raises if a connected peer has told of a loss; or has ended without a word, while
        another one refuses to connect.
        """
        # Others give up when a rank has ended, and say which one it was.
        for connection in sockets.values():
            culprit = _lost_by_peer(connection)
            if culprit is not None:
                raise lost(culprit)
        for peer, connection in sockets.items():
            if refuser is not None and peer != refuser and has_ended(connection):
                raise lost(peer)

    def check(absent: set[int]) -> None:
        """Raises if one of the absent peers will not come."""
        look()
        # A connected peer may be lost too. The absent ones may know it already and never come.
        ended = [peer for peer in (*sockets, *absent) if not is_running(_pid_in(names[peer]))]
        ended += [peer for peer, connection in sockets.items() if has_ended(connection)]
        # Afterwards, because a peer that gives up says why before it ends.
        check_others()
        if ended:
            raise lost(ended[0])
        if time.monotonic() > deadline:
            late = numbers[min(absent)]
            raise Timeout(
                f"rank {late} did not connect to rank {numbers[rank]} in time during {what}",
                rank=numbers[rank],
                peer=late,
                collective=what,
            )

    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer] = connection
            try:
                connection.connect(f"\0{names[peer]}")
                peer_pid(connection)
                connection.sendall(struct.pack("<I", rank))
            except ConnectionError:
                check_others(refuser=peer)
                raise lost(peer) from None
        absent = set(range(rank + 1, len(names)))
        listener.settimeout(_POLL_S)
        while absent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                check(absent)
                continue
            found = _rank_of(connection, deadline)
            if found in absent:
                sockets[found] = connection
                absent.remove(found)
            else:
                # A stranger; or a rank that has ended, which check() will see.
                connection.close()
    except BaseException as error:
        if isinstance(error, PeerLost) and error.peer in numbers:
            culprit = numbers.index(error.peer)
            for connection in sockets.values():
                _tell_loss(connection, culprit)
            if culprit > rank:
                late = set(range(rank + 1, len(names))) - {culprit, *sockets}
                _tell_late(listener, {peer: names[peer] for peer in late}, culprit)
        for connection in sockets.values():
            connection.close()
        raise
    finally:
        listener.close()
    return sockets


def _tell_loss(connection: socket.socket, culprit: int) -> None:
    """Tells a peer which rank's loss ends this connection."""
    # The peer may have gone, too.
    with contextlib.suppress(OSError):
        connection.send(HEADER.pack(LOST, culprit, 0), socket.MSG_DONTWAIT)


def _tell_late(listener: socket.socket, late: dict[int, str], culprit: int) -> None:
    """Tells the ranks that have yet to connect to this one which rank is lost.

    A rank that is refused takes the refuser for lost. Ranks above this one connect here before they
    connect to a lost rank that is above this one too, so they must not be refused here.

    Args:
        late: Rank -> name of its listener.
    """
    deadline = time.monotonic() + _LAST_WORD_S
    listener.settimeout(_POLL_S)
    while any(is_running(_pid_in(name)) for name in late.values()):
        if time.monotonic() > deadline:
            return
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection:
                peer = _rank_of(connection, deadline)
                if late.pop(peer, None) is not None:
                    _tell_loss(connection, culprit)


def _lost_by_peer(connection: socket.socket) -> int | None:
    """The rank whose loss the peer told of; None if it told of none."""
    try:
        said = connection.recv(HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return None
    if len(said) < HEADER.size:
        return None
    kind, culprit, _ = HEADER.unpack(said)
    return int(culprit) if kind == LOST else None


def _rank_of(connection: socket.socket, deadline: float) -> int:
    """The rank that a new connection's other end says; -1 if it does not, or is a stranger."""
    try:
        peer_pid(connection)
        (peer,) = struct.unpack("<I", receive(connection, 4, deadline))
    except (BackendError, ConnectionError, TimeoutError):
        return -1
    return int(peer)


def _pid_in(name: str) -> int:
    return int(name.split("-")[1])


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end of a connection has closed it, and all it said has been read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def peer_lost(
    rank: int, peer: int, what: str, why: str = "its process has ended or given up"
) -> PeerLost:
    """The exception of `rank`, which lost `peer` during `what`."""
    return PeerLost(
        f"rank {rank} lost rank {peer} during {what}: {why}; "
        "the survivors may go on with comm.shrink()",
        rank=rank,
        peer=peer,
        collective=what,
    )
