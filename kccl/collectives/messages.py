"""The part of send, recv, isend, irecv and group that is common to all backends.

host_messages.py has messages between CPUs, gpu_messages.py those between GPUs and on the simulator.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..base import arguments
from ..base.arrays import ArrayView
from ..base.errors import Error, InvalidArgument
from .context import Context
from .front import call_is_not_copied
from .one_sided import Call
from .prepared import Prepared, check_unmoved

ANY = -1
"""The peer, or the tag, of a receive that takes a message from any peer, or with any tag."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message whose arguments have been checked.

    Attributes:
        array, view: The caller's array, and its view.
        peer: The other rank; ANY in a receive from any rank.
        tag: The message's tag; ANY in a receive with any tag.
        receives: True if this rank receives the message, False if it sends it.
        stream: What Backend.stream() returned.
        channel: The channel.
    """

    array: Any
    view: ArrayView
    peer: int
    tag: int
    receives: bool
    stream: int
    channel: int


class Request(ABC):
    """A message under way, which isend() or irecv() has begun.

    Attributes:
        is_done: True once the message is known to be sent or received, on a GPU once it is issued
            on its stream. Reading it makes no progress.
        source, tag: The rank that sent a message, and its tag, once it has been received. None
            until then, and for the tag of a receive on a GPU that names a rank and takes any tag.
            Of a receive from any rank they are known on a GPU once the message's first bytes have
            come; the array is complete when the stream is. If a graph has captured that receive,
            they are those of the last replay.
    """

    __reduce_ex__ = call_is_not_copied

    @property
    @abstractmethod
    def is_done(self) -> bool: ...

    @property
    @abstractmethod
    def source(self) -> int | None: ...

    @property
    @abstractmethod
    def tag(self) -> int | None: ...

    @abstractmethod
    def test(self) -> bool:
        """Makes progress on all messages under way. Returns whether this one is done. Does not
        wait.

        On GPUs it issues all of them on their streams and returns True: this message is then done
        in the order of its stream. On the simulator it waits for them.

        Raises:
            Error: reset() has dropped this message.
            Timeout, PeerLost: The communicator has failed.
        """

    @abstractmethod
    def wait(self) -> Any:
        """Waits until the array may be reused, or has been received. Returns it.

        On a GPU the message's stream waits instead of the caller.

        Raises:
            Error: reset() has dropped this message.
            InvalidArgument: The received message has another length than the array.
            Timeout, PeerLost: The peer did not arrive in time, or has left or died.
        """


class MessageCall(Call):
    """The call send or recv of one communicator."""

    _NOT_IN_C = ("stream", "channel")
    RECEIVES: bool

    def __init__(self, context: Context, messages: "Messages") -> None:
        super().__init__(context)
        self._messages = messages

    def _may_copy(self) -> bool:
        """See AnsweredByC. What a group receives comes at its end, and what a prepared group sends
        is read each time.
        """
        messages = self._messages
        if not super()._may_copy():
            return False
        if messages.open_group() is None:
            return True
        return not self.RECEIVES and not messages.is_prepared

    def message(self, x: Any, peer: Any, tag: Any, stream: Any, channel: Any) -> Message:
        """Checks the arguments of a call. Returns them as a Message."""
        messages, context = self._messages, self._context
        view = context.backend.view(x, "x", writable=self.RECEIVES)
        takes_any = peer is None and self.RECEIVES
        return Message(
            array=x,
            view=view,
            peer=ANY if takes_any else self._peer(peer),
            tag=messages.tag_of(tag, receives=self.RECEIVES),
            receives=self.RECEIVES,
            stream=context.backend.stream(stream, view),
            channel=messages.channel_of(channel),
        )

    def make(self, message: Message) -> None:
        """Makes the call, or adds it to the group that is open."""
        if self._messages.open_group() is not None:
            self._messages.add(self, message)
        else:
            self._messages.make(self, message)

    def is_for_c(self) -> bool:
        """See Call. Under KCCL_CHECK=1 a group keeps its messages, and C does not know them all."""
        return super().is_for_c() and not self._context.checks

    def run(self, fields: Mapping[str, int], message: Message) -> None:
        """Runs the kernel of this name, and teaches C to run it."""
        self._run(message.stream, fields)
        self._teach(message)

    def teach(self, message: Message, group: Any) -> None:
        """Teaches C to add messages like this one to a group (csrc/host/group.cpp)."""
        self._taught()
        self.learn_group(group)
        self._teach(message)

    def _teach(self, message: Message) -> None:
        if message.view.is_direct:
            self.learn_dtype(message.array.dtype, message.view.exchange_type)

    def prepared(
        self, message: Message, fields: Mapping[str, Any], stream: Any, kernel: str = ""
    ) -> Prepared:
        """Returns the object for prepare(). `stream` is what the caller gave."""
        result = message.array if message.receives else None
        return self._prepare(fields, result, [("x", message.array, message.view)], stream, kernel)


def check_messages(context: Context, messages: Sequence[Message]) -> None:
    """Checks the memory of a prepared group's messages; see check_unmoved()."""
    arrays = [("x", message.array, message.view) for message in messages]
    check_unmoved(context, "group(prepare=True)", arrays)


class GroupOfCalls(Protocol):
    """The calls of a group: a list, or C's object in its place."""

    def __len__(self) -> int: ...


class Group:
    """The context manager that PointToPoint.group() returns, and describes."""

    __slots__ = ("_begin", "_messages", "_prepared")

    def __init__(self, messages: "Messages", prepared: "Callable[[], None] | None") -> None:
        """`prepared` gets the group's messages. If it is None, they are sent and received when the
        group ends.
        """
        self._messages = messages
        self._prepared = prepared
        # Number of calls of the outer group when this one began; -1 if there is no outer group.
        self._begin = -1

    def __enter__(self) -> "Callable[[], None] | None":
        messages = self._messages
        outer = messages.open_group()
        if outer is not None and self._prepared is not None:
            raise InvalidArgument("prepare is True, must be False in a group within a group")
        messages.context.check_usable()
        self._begin = -1 if outer is None else len(outer)
        if outer is None:
            messages.group = messages.begin_group()
            messages.group_thread = threading.get_ident()
            messages.is_prepared = self._prepared is not None
        return self._prepared

    def __exit__(self, error: object, *_: object) -> None:
        messages = self._messages
        if self._begin >= 0:
            if error is not None:
                messages.truncate_group(self._begin)
            return
        messages.group = None
        messages.end_group(self._prepared, drops=error is not None)


class Messages(ABC):
    """The messages of one communicator.

    Attributes:
        group: The calls of the group that is open; None if no group is open.
        group_thread: The thread that has opened the group.
        is_prepared: True if the group that is open is only prepared.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.group: GroupOfCalls | None = None
        self.group_thread = 0
        self.is_prepared = False

    def open_group(self) -> GroupOfCalls | None:
        """Returns the calls of this thread's open group; None if no group is open.

        Raises:
            Error: Another thread has a group open.
        """
        group = self.group
        if group is not None and self.group_thread != threading.get_ident():
            raise Error(
                f"rank {self.context.rank}: a group of this communicator is open in another thread;"
                " nothing was sent. Threads that make calls at the same time need a communicator "
                "each, as comm.split(0) makes it on all ranks"
            )
        return group

    def dropped(self, *, receives: bool, nbytes: int) -> Error:
        """Returns the error for a message under way that reset() has dropped."""
        what = "receive" if receives else "send"
        return Error(
            f"rank {self.context.rank}: reset() has dropped this {what} of {nbytes} bytes; begin "
            "it again on both ranks"
        )

    def channel_of(self, channel: Any) -> int:
        """Returns the number of a channel, after a check."""
        return arguments.between("channel", channel, 0, self.context.num_channels - 1)

    @abstractmethod
    def tag_of(self, tag: Any, *, receives: bool) -> int:
        """Returns a tag, after a check; ANY if a receive takes any tag."""

    @abstractmethod
    def make(self, call: MessageCall, message: Message) -> None:
        """Sends or receives a message."""

    @abstractmethod
    def prepare(self, call: MessageCall, message: Message, stream: Any) -> Prepared:
        """Prepares a call. `stream` is what the caller gave."""

    @abstractmethod
    def start(self, message: Message) -> Request:
        """Begins to send or receive a message."""

    @abstractmethod
    def begin_group(self) -> GroupOfCalls:
        """Opens a group. Returns its calls, which are none yet."""

    @abstractmethod
    def add(self, call: MessageCall, message: Message) -> None:
        """Adds a message to the group that is open."""

    @abstractmethod
    def truncate_group(self, count: int) -> None:
        """Drops the group's messages behind the first `count`."""

    @abstractmethod
    def prepared_group(self) -> Callable[[], None]:
        """Returns a callable to which end_group() gives messages. When called, it sends and
        receives them.
        """

    @abstractmethod
    def end_group(self, prepared: Callable[[], None] | None, *, drops: bool) -> None:
        """Ends the group that was open. With `drops`, drops its messages. Otherwise gives them to
        `prepared`, which prepared_group() has returned. If that is None, sends and receives them
        and waits for all of them.
        """

    @abstractmethod
    def drop(self) -> None:
        """Drops all messages under way, after the backend has forgotten them."""
