"""Sockets by which ranks of one machine connect: names, credentials, and who did not come.

The names lie in the abstract namespace, so a killed rank leaves nothing behind.
"""

import os
import select
import socket
import struct
import time

from ..base.errors import BackendError, PeerLost, Timeout

_UCRED = struct.Struct("3i")
_LOOK_S = 0.02  # between two looks at the processes of ranks that have not come yet


def listen() -> tuple[socket.socket, str]:
    """A listening socket, and the name under which `connect` finds it."""
    # With the process id, so that a peer which waits for this rank sees when it ends.
    name = f"kccl-{os.getpid()}-{os.urandom(16).hex()}"
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


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly `num_bytes` of a blocking stream.

    Raises:
        TimeoutError: They did not come before `deadline` (of time.monotonic()).
        ConnectionError: The stream ended before.
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
                peer_pid(connection)
                connection.sendall(struct.pack("<I", rank))
            except ConnectionError:
                raise peer_lost(rank, peer, "start-up") from None
        absent = {peer: _pid_in(names[peer]) for peer in range(rank + 1, len(names))}
        while absent:
            connection = _accept(rank, listener, sockets, absent, deadline)
            peer_pid(connection)
            try:
                (peer,) = struct.unpack("<I", receive(connection, 4, deadline))
            except (ConnectionError, TimeoutError):
                # It ended before it said who it is; _accept sees which rank is gone.
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
) -> socket.socket:
    """The next peer's connection; `absent` are the ranks that may still come, with process ids."""
    while True:
        listener.settimeout(_LOOK_S)
        try:
            return listener.accept()[0]
        except TimeoutError:
            # A peer that is connected may be lost as well, and the absent may know that already.
            lost = [peer for peer, connection in sockets.items() if _has_ended(connection)]
            lost += [peer for peer, pid in absent.items() if not _is_running(pid)]
            if lost:
                raise peer_lost(rank, lost[0], "start-up") from None
            if time.monotonic() > deadline:
                late = min(absent)
                raise Timeout(
                    f"rank {rank} waited in vain for rank {late} to connect",
                    rank=rank,
                    peer=late,
                    collective="start-up",
                ) from None


def _pid_in(name: str) -> int:
    return int(name.split("-")[1])


def _is_running(pid: int) -> bool:
    """False once the process has ended, also while it is a zombie."""
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
    """The error of `rank` that finds `peer` gone while they do `what`."""
    return PeerLost(
        f"rank {rank} lost rank {peer} during {what}: its process has ended or given up; "
        "the survivors may go on with comm.shrink()",
        rank=rank,
        peer=peer,
        collective=what,
    )
