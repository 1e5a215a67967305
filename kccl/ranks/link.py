"""A stream of messages between two ranks, over a Unix socket."""

import array
import os
import socket
import struct

HEADER = struct.Struct("<4sIQ")  # kind, sequence number, bytes that follow
LOST = b"lost"  # kind of a rank's last message: it gives up, because it lost the rank of the number
_FD_BYTES = array.array("i").itemsize


class Link:
    """The stream to one peer. No method waits.

    Attributes:
        socket: The connection.
        fds: The descriptors that are received but not yet used.
        unsent: Bytes that the socket has not taken yet. The next flush() goes on with them, so a
            message stays whole when the wait for its end fails.
        is_open: False once all that the peer sent is received and the stream has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.fds: list[int] = []
        self.unsent = bytearray()
        self.is_open = True
        self._received = bytearray()

    def put(self, kind: bytes, sequence: int, payload: bytes) -> None:
        """Appends a message, and sends what the socket takes now."""
        if self.is_open:
            self.unsent += HEADER.pack(kind, sequence, len(payload)) + payload
            self.flush()

    def put_fd(self, kind: bytes, sequence: int, fd: int) -> None:
        """Sends a message with a descriptor. The caller knows that the socket has room for it.

        Raises:
            ConnectionError: The peer has closed the stream.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.socket.sendmsg([HEADER.pack(kind, sequence, 0)], ancillary)

    def flush(self) -> None:
        """Sends what the socket takes now."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The peer reads no more. What it sent may still be here, so fill() finds the end.
            self.unsent.clear()

    def fill(self) -> None:
        """Receives what has arrived. Sets `is_open` to False if the stream has ended."""
        while self.is_open:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(
                    1 << 16, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            for _, _, payload in ancillary:
                self.fds.extend(array.array("i", payload[: len(payload) // _FD_BYTES * _FD_BYTES]))
            self._received += data
            if not data:
                self.is_open = False
                self.unsent.clear()

    def take(self) -> tuple[bytes, int, bytes] | None:
        """The next complete message as (kind, sequence number, payload); None if there is none."""
        if len(self._received) < HEADER.size:
            return None
        kind, sequence, length = HEADER.unpack_from(self._received)
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return kind, sequence, payload

    def put_back(self, kind: bytes, sequence: int, payload: bytes) -> None:
        """Makes this the next message that take() returns."""
        self._received[:0] = HEADER.pack(kind, sequence, len(payload)) + payload

    def close(self) -> None:
        """Closes the stream and the descriptors that are received but not used."""
        self.socket.close()
        self.is_open = False
        self.drop_fds()

    def drop_fds(self) -> None:
        """Closes the descriptors that are received but not used."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
