"""The rendezvous: ranks that a launcher started without MPI exchange one string each, by sockets.

Rank 0 listens under a name that all ranks know. It collects all ranks' strings, and sends all of
them to each rank. So rank 0 also says which rank is missing, has ended or cannot start.
"""

import contextlib
import json
import socket
import struct
from typing import Any

from ..base import clock
from ..base.errors import BackendError, InvalidArgument, PeerLost
from ..base.syscalls import allowed
from . import refusal, sockets
from .dialing import dial, new_socket
from .losses import Watch, absent, ended_before
from .place import Place
from .siblings import Siblings

_RETRY_S = 0.002
# The further seconds after the time-out in which the other ranks wait for rank 0 to name the
# missing rank.
_LAST_REPLY_S = 1.0


def exchange(
    name: str,
    job: str,
    rank: int,
    world_size: int,
    text: str,
    seconds: float,
    siblings: Siblings | None = None,
) -> list[str]:
    """Exchanges strings with the other ranks, as JobRank.exchange does.

    Args:
        name: Name of the rendezvous.
        job: The job's unique name.
        rank, world_size: This rank, and the number of ranks.
        text: This rank's string.
        seconds: Most seconds to wait for the others.
        siblings: The other ranks' processes, to be watched if the launcher does not tell that one
            has ended; None otherwise.

    Raises:
        BackendError: Another process has the place of this rank.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    deadline = clock.now() + seconds
    place = Place(job, rank)

    def look() -> None:
        place.check()
        if siblings is not None:
            siblings.check()

    with Watch(rank, job, look) as watch:
        if rank == 0:
            return _host_rendezvous(name, world_size, text, deadline, watch)
        return _join_rendezvous(name, rank, text, deadline, watch)


def _send(connection: socket.socket, message: object, deadline: float) -> None:
    data = json.dumps(message).encode()
    data = struct.pack("<I", len(data)) + data
    while data:
        connection.settimeout(max(clock.left(deadline), 0.001))
        try:
            data = data[connection.send(data) :]
        except TimeoutError:
            if clock.now() >= deadline:
                raise


def _receive(connection: socket.socket, deadline: float) -> Any:
    (length,) = struct.unpack("<I", sockets.receive(connection, 4, deadline))
    return json.loads(sockets.receive(connection, length, deadline))


def _host_rendezvous(
    name: str, world_size: int, text: str, deadline: float, watch: Watch
) -> list[str]:
    """Rank 0's part: collects every rank's string, and sends all of them to every rank."""
    try:
        listener = sockets.bind(name)
    except OSError as error:
        raise BackendError(
            f"another process is rank 0 already: the rendezvous {name} is taken ({error}). If a "
            "rank started this process, which has inherited its variables, this one must not call "
            "kccl.init(); if this one is rank 0, the other one must not. If the other one is of "
            "another job, give each job a rendezvous of its own"
        ) from error
    texts = {0: text}
    connections: dict[int, socket.socket] = {}
    refused: list[str] = []
    try:
        while len(texts) < world_size:
            found = None if refused else refusal.first_refusal([*texts.values()])
            if found is not None:
                # This string is a refusal: a rank cannot start. Every other rank gets it as soon as
                # it connects.
                refused, deadline = [found], min(deadline, clock.now() + refusal.WAITS_S)
            if refused:
                _send_all(connections, refused, deadline)
                _close_all(connections)
            if not watch.wait(listener, deadline - clock.now()):
                if clock.now() < deadline:
                    continue
                raise TimeoutError
            with allowed("accept"):
                connection, _ = listener.accept()
            try:
                sockets.peer_pid(connection)
                rank, its_text = _receive(connection, deadline)
            except (BackendError, ConnectionError):
                # The connection is of another user's process, or of a rank that ended before it
                # sent its number. In the latter case the timeout will name that rank.
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            if rank in connections and sockets.has_ended(connections[rank]):
                # The earlier connection was of a helper process, which has given the rank's place
                # (see place.py) back.
                connections.pop(rank).close()
                texts.pop(rank)
            if rank in texts:
                # The rank is connected already, so this connection is of a helper process with the
                # rank's variables. The helper is refused, and the job goes on.
                with contextlib.suppress(OSError), connection:
                    _send(connection, {"taken": rank}, clock.now() + _LAST_REPLY_S)
                continue
            if not 0 < rank < world_size:
                connection.close()
                raise InvalidArgument(
                    f"a process says that it is rank {rank} of {world_size}: there is no such rank"
                )
            connections[rank] = connection
            texts[rank] = its_text
        found = refusal.first_refusal([*texts.values()])
        everyone = [found] if found is not None else [texts[each] for each in range(world_size)]
        _send_all(connections, everyone, deadline)
        return everyone
    except TimeoutError:
        if refused:
            return refused
        missing = min(set(range(world_size)) - set(texts), default=None)
        _send_all(connections, missing, clock.now() + _LAST_REPLY_S)
        raise absent(0, missing) from None
    except PeerLost as error:
        if refused:
            return refused
        # Tells the others, so that all ranks name the same lost rank.
        _send_all(connections, {"lost": error.peer}, clock.now() + _LAST_REPLY_S)
        raise
    except BackendError:
        # Place.check() raises this in a helper process when the true rank 0 has come. The other
        # ranks must connect to that one.
        _move(listener, connections)
        raise
    finally:
        _close_all(connections)
        listener.close()


def _move(listener: socket.socket, connections: dict[int, socket.socket]) -> None:
    """Closes the listener, and tells all ranks that have connected to it to connect again."""
    # From here on the system refuses new connections, and accept() still returns the earlier ones.
    listener.shutdown(socket.SHUT_RD)
    coming = []
    with contextlib.suppress(OSError):
        while True:
            coming.append(listener.accept()[0])
    # The listener is closed before the ranks are told to connect again: they do so at once, and
    # must not reach this listener.
    listener.close()
    ends = clock.now() + _LAST_REPLY_S
    for connection in coming:
        with contextlib.suppress(OSError, BackendError):
            sockets.peer_pid(connection)
            rank, _ = _receive(connection, ends)
            connections[rank] = connection
    _send_all(connections, {"moved": True}, ends)
    for connection in coming:
        connection.close()


def _close_all(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
    connections.clear()


def _send_all(connections: dict[int, socket.socket], message: object, deadline: float) -> None:
    """Sends a message to all connected ranks, and ignores ranks that have ended.

    An error of one connection is ignored, so that the next rank gets the message: without it, that
    rank would take rank 0 for lost. sockets.connect() names a rank that has ended.
    """
    for connection in connections.values():
        with contextlib.suppress(OSError):
            _send(connection, message, deadline)


def _join_rendezvous(name: str, rank: int, text: str, deadline: float, watch: Watch) -> list[str]:
    """The part of ranks 1 and up: sends this rank's string, and receives all ranks' strings."""
    while True:
        with new_socket() as connection:
            try:
                dial(connection, name)
            except ConnectionRefusedError:
                if clock.now() > deadline:
                    raise absent(rank, 0) from None
                watch.wait(None, _RETRY_S)
                continue
            sockets.peer_pid(connection)
            try:
                _send(connection, [rank, text], deadline)
                ends = deadline + _LAST_REPLY_S
                while not watch.wait(connection, ends - clock.now()):
                    if clock.now() > ends:
                        raise TimeoutError
                everyone = _receive(connection, ends)
            except TimeoutError:
                raise absent(rank, None) from None
            except PeerLost:  # a ConnectionError too
                # Rank 0 may have sent the refusal of that rank, which says why it has ended.
                everyone = _last_reply(connection)
                if not isinstance(everyone, list):
                    raise
            except ConnectionError as error:
                # Rank 0 may have given up because another rank has ended. The launcher may be
                # about to announce that rank: wait() then raises PeerLost for it.
                watch.wait(None, _LAST_REPLY_S)
                raise PeerLost(
                    f"rank {rank} lost rank 0 at start-up: {error}",
                    rank=rank,
                    peer=0,
                    collective="start-up",
                ) from error
            if isinstance(everyone, list):
                return everyone
            if isinstance(everyone, dict) and "taken" in everyone:
                raise BackendError(
                    f"another process is rank {rank} already. If a rank started this process, "
                    "which has inherited its variables, this one must not call kccl.init(); if "
                    f"this one is rank {rank}, the other one must not"
                )
            if isinstance(everyone, dict) and "moved" in everyone:
                continue
            if isinstance(everyone, dict):
                raise ended_before(rank, everyone["lost"])
            raise absent(rank, everyone)


def _last_reply(connection: socket.socket) -> object:
    """Returns rank 0's next message; None if none comes within _LAST_REPLY_S."""
    try:
        return _receive(connection, clock.now() + _LAST_REPLY_S)
    except OSError:
        return None
