"""Sends and receives messages between two ranks, over a socket."""

import array
import os
import socket
import struct

from ..base.syscalls import allowed, check_allowed

HEADER = struct.Struct("<4sIQ")  # kind, sequence number, bytes of payload that follow
# Kinds of messages.
DATA = b"data"  # a rank's part of an exchange; begins with the name of the call, see messages.py
FD = b"fd  "  # like DATA, and carries a file descriptor
FAIL = b"fail"  # the call with this sequence number has failed on the sender; says why
RESET = b"rset"  # the sender is in reset(); the sequence number is its phase, see Mesh.reset()
LIVE = b"live"  # the sender is in shrink(); says what it knows, see knowledge.py
LOST = b"lost"  # the last message of a rank that gives up; the number is the rank that it lost
LEFT = b"left"  # the last message of a rank that makes no more calls on this mesh; says why
START_UP = 1 << 8  # the sequence number of a communicator's first call, see Exchanges
NO_FD = -1  # stands for a received descriptor that this process had no room to open
_FD_BYTES = array.array("i").itemsize


class Connection(socket.socket):
    """A connection that is closed when nobody refers to it, at the end of a program too.

    Python warns of a socket that a program has not closed. A program need not close a communicator
    before it ends, so this class closes the socket without a warning.
    """

    def __del__(self) -> None:
        self.close()


class Link:
    """The connection to one peer, by which messages go both ways. No method waits.

    Attributes:
        socket: The connection.
        fds: The descriptors of messages that take() has not returned yet.
        unsent: Bytes of messages that the socket has not taken yet. They are kept when a wait
            times out, and the next flush() sends them, so the peer receives whole messages.
        is_open: False once all that the peer sent is received and the connection has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        is_connection = isinstance(connection, Connection)
        self.socket = connection if is_connection else Connection(fileno=connection.detach())
        # A new socket object has the timeout of socket.setdefaulttimeout(), which may not be 0.
        self.socket.setblocking(False)
        self.fds: list[int] = []
        self.unsent = bytearray()
        self.is_open = True
        self._received = bytearray()

    def put(self, kind: bytes, sequence: int, payload: bytes) -> None:
        """Appends a message to `unsent`, and sends what the socket takes now."""
        if self.is_open:
            self.unsent += HEADER.pack(kind, sequence, len(payload)) + payload
            self.flush()

    def put_fd(self, sequence: int, payload: bytes, fd: int) -> None:
        """Sends a message with a descriptor. The caller must know that the socket has room for it.

        Raises:
            ConnectionError: The peer has closed the connection.
            OSError: The operating system refused to send a descriptor.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        with allowed("sendmsg"):
            self.socket.sendmsg([HEADER.pack(FD, sequence, len(payload)) + payload], ancillary)

    def flush(self) -> None:
        """Sends what the socket takes now."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The peer reads no more, so nothing more is sent. The link stays open, because messages
            # of the peer may still be unread. fill() sets is_open to False once all are received.
            self.unsent.clear()

    def fill(self) -> None:
        """Receives what has arrived. Sets `is_open` to False if the connection has ended."""
        while self.is_open:
            try:
                data, ancillary, flags, _ = self.socket.recvmsg(
                    1 << 16, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                check_allowed(error, "recvmsg")
                data, ancillary, flags = b"", [], 0
            for _, _, payload in ancillary:
                self.fds.extend(array.array("i", payload[: len(payload) // _FD_BYTES * _FD_BYTES]))
            if flags & socket.MSG_CTRUNC:
                self.fds.append(NO_FD)
            self._received += data
            if not data:
                self.is_open = False
                self.unsent.clear()

    def take(self) -> tuple[bytes, int, bytes] | None:
        """Returns the next complete message as (kind, sequence number, payload); None if there is
        none.

        The payload of an FD ends with the descriptor's number in decimal digits. The caller must
        close that descriptor.
        """
        if len(self._received) < HEADER.size:
            return None
        kind, sequence, length = HEADER.unpack_from(self._received)
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        # Descriptors arrive with the first byte of their message, and in the order of the messages.
        # So the first one is that of the first FD.
        return kind, sequence, payload + (b"%d" % self.fds.pop(0) if kind == FD else b"")

    def put_back(self, kind: bytes, sequence: int, payload: bytes) -> None:
        """Makes this the next message that take() returns. Must not be called with an FD."""
        self._received[:0] = HEADER.pack(kind, sequence, len(payload)) + payload

    def close(self) -> None:
        """Closes the connection, and the descriptors that were received but not taken."""
        self.socket.close()
        self.is_open = False
        for fd in self.fds:
            close_fd(fd)
        self.fds.clear()


def close_fd(fd: int) -> None:
    """Closes a received descriptor. Does nothing for NO_FD."""
    if fd != NO_FD:
        os.close(fd)
