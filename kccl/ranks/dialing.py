"""Makes and connects Unix sockets. If the system refuses a call, the error names the call."""

import socket

from ..base.syscalls import allowed


def new_socket() -> socket.socket:
    """Returns a new Unix socket of type SOCK_STREAM."""
    with allowed("socket"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def dial(connection: socket.socket, name: str) -> None:
    """Connects a Unix socket with the one that listens under a name."""
    with allowed("connect"):
        connection.connect(f"\0{name}")
