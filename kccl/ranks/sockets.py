"""Unix sockets by which the ranks of one machine connect.

Their names are in the abstract namespace, so a killed rank leaves nothing behind.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable

from ..base.errors import BackendError, PeerLost, Timeout

_UCRED = struct.Struct("3i")
_POLL_S = 0.02  # between two checks whether the missing ranks' processes still run


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


def connect(
    rank: int,
    names: list[str],
    listener: socket.socket,
    deadline: float,
    look: Callable[[], None] = lambda: None,
) -> dict[int, socket.socket]:
    """Connects this rank with every other one. Collective.

    Args:
        rank: This rank.
        names: Name of each rank's listener, in rank order.
        listener: This rank's listener. It is closed.
        deadline: A value of time.monotonic().
        look: Called now and then during the wait. What it raises ends the wait.

    Returns:
        One connected socket for each peer.

    Raises:
        Timeout: A rank did not connect before the deadline.
        PeerLost: A rank's process has ended.
    """
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[peer] = connection
            try:
                connection.connect(f"\0{names[peer]}")
                peer_pid(connection)
                connection.sendall(struct.pack("<I", rank))
            except ConnectionError:
                raise peer_lost(rank, peer, "start-up") from None
        absent = {peer: _pid_in(names[peer]) for peer in range(rank + 1, len(names))}
        while absent:
            connection = _accept(rank, listener, sockets, absent, deadline, look)
            peer_pid(connection)
            try:
                (peer,) = struct.unpack("<I", receive(connection, 4, deadline))
            except (ConnectionError, TimeoutError):
                # It ended before it sent its rank. _accept() will see which rank is gone.
                connection.close()
                continue
            sockets[peer] = connection
            del absent[peer]
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    finally:
        listener.close()
    return sockets


def _accept(
    rank: int,
    listener: socket.socket,
    sockets: dict[int, socket.socket],
    absent: dict[int, int],
    deadline: float,
    look: Callable[[], None],
) -> socket.socket:
    """The connection of the next peer. `absent`: rank -> process id, of ranks still to come."""
    while True:
        listener.settimeout(_POLL_S)
        try:
            return listener.accept()[0]
        except TimeoutError:
            look()
            # A connected peer may be lost too. The absent ranks may know it already and never come.
            lost = [peer for peer, connection in sockets.items() if _has_ended(connection)]
            lost += [peer for peer, pid in absent.items() if not _is_running(pid)]
            if lost:
                raise peer_lost(rank, lost[0], "start-up") from None
            if time.monotonic() > deadline:
                late = min(absent)
                raise Timeout(
                    f"rank {late} did not connect to rank {rank} in time",
                    rank=rank,
                    peer=late,
                    collective="start-up",
                ) from None


def _pid_in(name: str) -> int:
    return int(name.split("-")[1])


def _is_running(pid: int) -> bool:
    """False once the process has ended, even if it is still a zombie."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([pidfd], [], [], 0)[0]
    finally:
        os.close(pidfd)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def peer_lost(rank: int, peer: int, what: str) -> PeerLost:
    """The exception of `rank`, which lost `peer` during `what`."""
    return PeerLost(
        f"rank {rank} lost rank {peer} during {what}: its process has ended or given up; "
        "the survivors may go on with comm.shrink()",
        rank=rank,
        peer=peer,
        collective=what,
    )
