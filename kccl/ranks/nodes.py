"""Nodes: groups of ranks that share memory. Says on which node each rank is, and connects ranks of
different nodes by TCP.

A rank that listens for both has a name of the form unix-name@node@token@port@addresses.
"""

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base import clock
from ..base.errors import BackendError, Error, InvalidArgument

MOST_PER_NODE = 8  # abi.MAX_WORLD_SIZE, not imported because siblings.guard() runs without the core
"""Most ranks of a node; a machine with more ranks is divided into several nodes."""
_SIOCGIFADDR = 0x8915
_TOKEN_BYTES = 16
_YES = b"kccl"
_MOST_NAME_BYTES = 900  # bootstrap.py exchanges a name, in a JSON object, in at most 1,024 bytes
# Seconds for one try to connect to one of a peer's addresses. A rank listens before any peer learns
# its name, so it answers at once.
_TRY_S = 2.0
# Seconds after which unanswered data ends a connection. A machine that lost power closes none
# itself.
_SILENCE_S = 20


@dataclass(frozen=True)
class Home:
    """Where a rank is.

    Attributes:
        node: The number of its node.
        mpi_rank: Its rank in MPI.COMM_WORLD.
    """

    node: int
    mpi_rank: int


def homes_of(machines: Sequence[str], most: int) -> tuple[Home, ...]:
    """Returns where the ranks are, or () if all are on one node.

    Args:
        machines: Each rank's machine_id().
        most: Most ranks of a node, from KCCL_RANKS_PER_NODE. 0: MOST_PER_NODE, but the ranks of a
            job on a single machine are one node, however many they are.

    Raises:
        InvalidArgument: There are too many nodes.
    """
    if most == 0 and len(set(machines)) == 1:
        return ()
    numbers: dict[tuple[str, int], int] = {}
    seen: dict[str, int] = {}
    homes = []
    for rank, machine in enumerate(machines):
        index = seen[machine] = seen.get(machine, -1) + 1
        key = machine, index // (most or MOST_PER_NODE)
        homes.append(Home(numbers.setdefault(key, len(numbers)), rank))
    if len(numbers) > MOST_PER_NODE:
        raise InvalidArgument(
            f"the ranks are on {len(numbers)} nodes of at most {most or MOST_PER_NODE} ranks, must "
            f"be on at most {MOST_PER_NODE} nodes"
        )
    return tuple(homes) if len(numbers) > 1 else ()


def groups_of(homes: Sequence[Home]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each node, in rank order."""
    nodes: dict[int, list[int]] = {}
    for rank, home in enumerate(homes):
        nodes.setdefault(home.node, []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


# ---- Names and listeners -------------------------------------------------------------------------


class Listener:
    """Listens on a Unix socket for ranks of this node, and on a TCP port for those of others.

    It has the methods of a socket that sockets.connect() needs.
    """

    def __init__(self, nearby: socket.socket, name: str, node: int) -> None:
        self._token = os.urandom(_TOKEN_BYTES)
        self._timeout: float | None = None
        self._nearby = nearby
        self._far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._far.bind(("0.0.0.0", 0))
            self._far.listen(64)
            # accept() is called when poll() has reported a connection. If the peer has closed it in
            # between, a blocking accept() would wait for the next connection.
            self._far.setblocking(False)
        except BaseException:
            self.close()
            raise
        port = self._far.getsockname()[1]
        self.name = f"{name}@{node}@{self._token.hex()}@{port}@"
        addresses = _addresses()
        if not addresses:
            self.close()
            raise BackendError("this machine has no IPv4 address, which ranks of other nodes need")
        # A machine may have more addresses than a name has room for. The first ones are kept.
        most = (_MOST_NAME_BYTES - len(self.name)) // len("255.255.255.255,")
        self.name += ",".join(addresses[:most])

    def settimeout(self, seconds: float | None) -> None:
        """Sets the timeout of accept(), as socket.settimeout() does."""
        self._timeout = seconds

    def accept(self) -> tuple[socket.socket, object]:
        """Accepts a connection, as socket.accept() does. A connection by TCP must first send this
        rank's token. Without the token it is closed.
        """
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            poll = select.poll()
            poll.register(self._nearby, select.POLLIN)
            poll.register(self._far, select.POLLIN)
            left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
            ready = [fd for fd, _ in poll.poll(left)]
            if not ready:
                raise TimeoutError
            if self._nearby.fileno() in ready:
                return self._nearby.accept()
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                connection, address = self._far.accept()
                stack.callback(connection.close)
                if self._is_ours(connection):
                    stack.pop_all()
                    return connection, address

    def _is_ours(self, connection: socket.socket) -> bool:
        deadline = clock.now() + _TRY_S
        if _exactly(connection, _TOKEN_BYTES, lambda: _check_time(deadline)) != self._token:
            return False
        _prepare(connection)
        connection.sendall(_YES)
        return True

    def close(self) -> None:
        """Closes both listening sockets."""
        self._nearby.close()
        self._far.close()


def node_in(name: str) -> int | None:
    """Returns the node in a listener's name; None for a name of a Unix socket alone."""
    parts = name.split("@")
    return int(parts[1]) if len(parts) > 1 else None


def nearby(name: str) -> str:
    """Returns the Unix socket's name, which is the first part of a listener's name."""
    return name.split("@")[0]


def connect(name: str, look: Callable[[], None]) -> socket.socket:
    """Connects with a rank of another node.

    Args:
        name: The name of that rank's listener.
        look: Called now and then. What it raises ends the tries.

    Raises:
        ConnectionError: Nobody answers at any of the rank's addresses.
    """
    _, _, token, port, addresses = name.split("@")
    for address in addresses.split(","):
        look()
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            _dial(connection, (address, int(port)), look)
            connection.sendall(bytes.fromhex(token))
            # Only look() limits this wait: the peer may be busy with another rank's connection.
            if _exactly(connection, len(_YES), look) == _YES:
                _prepare(connection)
                return connection
        except Error:
            # Not an error of the socket: look() raised it. (PeerLost and Timeout are OSErrors too.)
            connection.close()
            raise
        except OSError:
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise ConnectionRefusedError(f"nobody answers at {addresses}, port {port}")


def _dial(connection: socket.socket, address: tuple[str, int], look: Callable[[], None]) -> None:
    """Connects within _TRY_S; `look` as in connect(). Raises OSError if nobody answers."""
    deadline = clock.now() + _TRY_S
    connection.setblocking(False)
    error = connection.connect_ex(address)
    if error == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while not poll.poll(clock.LOOK_S * 1000):
            look()
            _check_time(deadline)
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def _exactly(connection: socket.socket, num_bytes: int, look: Callable[[], None]) -> bytes:
    """Reads `num_bytes`, or fewer if the connection ends first. Calls `look` now and then."""
    connection.settimeout(clock.LOOK_S)
    data = b""
    while len(data) < num_bytes:
        look()
        with contextlib.suppress(TimeoutError):
            more = connection.recv(num_bytes - len(data))
            if not more:
                break
            data += more
    return data


def _check_time(deadline: float) -> None:
    if clock.now() > deadline:
        raise TimeoutError


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


def _addresses() -> list[str]:
    """Returns this machine's IPv4 addresses. Addresses that only this machine can reach come
    last.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            # ioctl() fails for an interface without an IPv4 address, which is left out.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))
