"""send, recv, isend, irecv, group: messages between two ranks."""

from typing import Any

from ..base.errors import InvalidArgument
from ..plan.specs import BY_NAME
from .context import Context
from .gpu_messages import GpuMessages
from .host_messages import HostMessages
from .messages import Group, MessageCall, Messages, Request
from .prepared import Prepared


class Send(MessageCall):
    """Gives an array to a peer."""

    _NAME, RECEIVES = "send", False

    def __call__(
        self, x: Any, peer: int, tag: int = 0, *, stream: Any = None, channel: int = 0
    ) -> None:
        """Sends x to a peer, whose recv() takes it. Returns when x may be reused.

        On the host arrays of up to 8,160 bytes are buffered: the call returns before the peer
        receives them, unless some 48 KiB of this rank's messages still lie in the peer's buffer.
        With a longer array it returns when the peer has received it. Messages that arrive before
        their recv() are moved to memory of the peer, without a limit. Two ranks that send each
        other long arrays first and receive then would wait for each other: use group() or isend().

        On a GPU the call is enqueued, and the stream waits instead of the caller. Four messages to
        one peer are buffered, each of up to 255 KiB (63 KiB on channels other than 0; 4,080 bytes
        on the simulator). A fifth message waits until the peer has received the first one. A longer
        message waits until the peer receives it.

        Args:
            x: Array, strided ones as in all_reduce. In a group a strided one is read within this
                call, others at the group's end. A prepared group takes C-contiguous arrays only.
            peer: The rank that receives x; may be this rank.
            tag: A number from 0 to 2^31 - 1. recv() takes only messages with the tag that it asks
                for. On GPUs and on the simulator the largest is 65,534, and a tag does not change
                the order: see recv().
            stream, channel: As in all_reduce. recv() takes only messages sent on its channel. On
                the host the channel must be 0.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: The peer did not arrive in time, or has left or died.
        """
        self.make(self.message(x, peer, tag, stream, channel))

    def prepare(
        self, x: Any, peer: int, tag: int = 0, *, stream: Any = None, channel: int = 0
    ) -> Prepared:
        """Checks the call once. Calling the returned object, `op()`, makes it, any number of times.

        Arguments and errors are those of the call itself. The object keeps x alive.
        """
        message = self.message(x, peer, tag, stream, channel)
        return self._messages.prepare(self, message, stream)


class Recv(MessageCall):
    """Takes the array that a peer sends."""

    _NAME, RECEIVES = "recv", True

    def __call__(
        self,
        x: Any,
        peer: int | None = None,
        tag: int | None = None,
        *,
        stream: Any = None,
        channel: int = 0,
    ) -> Any:
        """Receives into x the first message from `peer` with `tag`. Waits if none has arrived.

        Messages of one peer with one tag, on one channel, are received in the order in which they
        were sent.

        On GPUs and on the simulator messages of one peer on one channel are received in the order
        in which they were sent, whatever their tags. A message with another tag than `tag` is an
        error. But those of one group, and those that isend() and irecv() have begun and that are
        issued together, are in the order of their tags, receives with any tag first. So both ranks
        may name them in any order.

        Args:
            x: Array, strided ones as in all_reduce, but C-contiguous in a group. The message must
                have its length in bytes.
            peer: The rank that sends the message. None takes a message from any rank; irecv()'s
                request says from which, on a GPU once the message's first bytes have come; the
                array is complete when the stream is. On GPUs and on the simulator it is the first
                rank whose next message on the channel has the tag. In a group it is a rank that no
                other receive of the group names, and a group with sends has at most one such
                receive on a stream and channel; see group().
            tag: The tag that send() was given. None takes any tag.
            stream, channel: As in send().

        Returns:
            x.

        Raises:
            InvalidArgument: An argument is wrong. Or the message has another length than x, or on
                a GPU another tag; the text has both, and on a GPU a later call raises it.
            Timeout, PeerLost: The peer did not arrive in time, or has left or died. With peer None:
                all peers have gone.
        """
        self.make(self.message(x, peer, tag, stream, channel))
        return x

    def prepare(
        self,
        x: Any,
        peer: int | None = None,
        tag: int | None = None,
        *,
        stream: Any = None,
        channel: int = 0,
    ) -> Prepared:
        """Checks the call once. Calling the returned object, `op()`, makes it and returns x.

        Arguments and errors are those of the call itself. The object keeps x alive.
        """
        message = self.message(x, peer, tag, stream, channel)
        return self._messages.prepare(self, message, stream)


class PointToPoint:
    """The calls of a communicator between two ranks, a part of the class Communicator."""

    context: Context
    send: Send
    recv: Recv
    _messages: Messages

    def _open_messages(self) -> None:
        on_host = self.context.backend.name in BY_NAME["send"].targets
        self._messages = (HostMessages if on_host else GpuMessages)(self.context)
        self.send = Send(self.context, self._messages)
        self.recv = Recv(self.context, self._messages)

    def _forget_messages(self) -> None:
        """Drops what C has been taught: no call of a closed communicator needs it."""
        self.send.forget()
        self.recv.forget()

    def _drop_messages(self) -> None:
        """Drops all messages under way, after the backend has forgotten them."""
        self._messages.drop()

    def isend(
        self, x: Any, peer: int, tag: int = 0, *, stream: Any = None, channel: int = 0
    ) -> Request:
        """Begins to send x, and returns at once. Arguments and errors are those of send().

        x must not be written until the request's wait() or test() says that it is done. The message
        makes progress only in this rank's calls of send, recv, isend, irecv, wait and test. On GPUs
        and on the simulator the next send, recv, wait, test or end of a group issues all begun
        messages together. close() drops begun messages that were not issued. A prepared call is
        made at once, before begun messages.

        Raises:
            InvalidArgument: A group is open in this thread. Call send() in it, which begins when
                the group ends.
        """
        self._check_no_group("isend")
        return self._messages.start(self.send.message(x, peer, tag, stream, channel))

    def irecv(
        self,
        x: Any,
        peer: int | None = None,
        tag: int | None = None,
        *,
        stream: Any = None,
        channel: int = 0,
    ) -> Request:
        """Begins to receive x, and returns at once. Arguments and errors are those of recv().

        x must not be used until the request's wait() or test() says that it is done. On GPUs and on
        the simulator the stream waits for the message once it has been issued; see isend().

        Raises:
            InvalidArgument: A group is open in this thread. Call recv() in it, which begins when
                the group ends.
        """
        self._check_no_group("irecv")
        return self._messages.start(self.recv.message(x, peer, tag, stream, channel))

    def _check_no_group(self, name: str) -> None:
        if self._messages.open_group() is not None:
            raise InvalidArgument(
                f"{name}() is called within a group, which begins its messages at its end: call "
                f"{name[1:]}() there"
            )

    def group(self, *, prepare: bool = False) -> Group:
        """Returns a context at whose end the sends and receives called within it are issued
        together.

        They do not wait for each other, so ranks may send to each other in any order. When the
        group ends, all of them are done. Until then the arrays that it sends must not be written,
        and those that it receives must not be used. An exception within it drops them: nothing was
        sent. A prepared call within it is made at once. A group within a group is part of it, and
        an exception that leaves the inner one drops the calls of that one only.

        On GPUs and on the simulator a group makes one call on each stream and channel, if it has at
        most one message to and one from each peer. With several, the first call has the first
        message to and from each peer, the second call the second, and so on. They are in the order
        of their tags; with the same tag, ranks must make them in matching order, because a later
        call waits for the end of the one before. A receive from any rank could then take a message
        of a rank that waits for a later call. So messages that are issued together on one stream
        and channel have sends, or several receives from any rank, not both. That holds for begun
        messages too. Name the ranks, or receive in groups behind the sends.

            with comm.group():
                comm.send(mine, right)
                comm.recv(theirs, left)

        With `prepare` the context returns a callable. The end of the group issues nothing; each
        call of the callable issues the messages. It keeps the arrays alive, which must be
        C-contiguous. On a GPU it uses the streams that were current within the group.

            with comm.group(prepare=True) as exchange:
                comm.send(mine, right)
                comm.recv(theirs, left)
            exchange()

        Args:
            prepare: Whether the messages are only prepared.

        Raises:
            InvalidArgument: A group with `prepare` is within another group. Or, on GPUs and on the
                simulator, it has sends and several receives from any rank; nothing was sent.
            Error: A group of this communicator is open in another thread.
            Timeout, PeerLost: A peer did not arrive in time, or has left or died.
        """
        return Group(self._messages, self._messages.prepared_group() if prepare else None)
