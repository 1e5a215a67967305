"""Messages between ranks on CPUs.

After the first send and the first recv, C answers these calls without Python
(csrc/host/one_sided.cpp). csrc/host/messages.h pairs sends and receives.
"""

from collections.abc import Sequence
from typing import Any

from ..base import arguments
from ..base.abi import fastcall, ffi, lib
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from .context import Context
from .front import call_is_not_copied
from .messages import ANY, Message, MessageCall, Messages, Request, check_messages
from .prepared import Prepared, address_of

_MOST_TAG = 2**31 - 1
# With this many messages under way, start() looks for those that are done and drops their arrays.
_FEW = 64


class HostRequest(Request):
    """See Request."""

    def __init__(self, messages: "HostMessages", array: Any, message: Any) -> None:
        self._messages = messages
        self._array = array
        self._message = message

    @property
    def is_done(self) -> bool:
        """See Request."""
        return bool(self._message.is_done)

    @property
    def source(self) -> int | None:
        """See Request."""
        is_received = self._message.receives and self.is_done
        return int(self._message.source) if is_received else None

    @property
    def tag(self) -> int | None:
        """See Request."""
        is_received = self._message.receives and self.is_done
        return int(self._message.source_tag) if is_received else None

    def test(self) -> bool:
        """See Request."""
        if not self.is_done:
            self._messages.test(self._message)
        if self.is_done:
            self._messages.discard(self._message)
        return self.is_done

    def wait(self) -> Any:
        """See Request."""
        if not self.is_done:
            self._messages.wait(self._message)
        self._messages.discard(self._message)
        return self._array


class HostGroup(fastcall.Group):
    """Messages that C sends and receives together when this object is called
    (csrc/host/group.cpp).
    """

    __reduce_ex__ = call_is_not_copied


class CheckedGroup(HostGroup):
    """Messages on a CPU under KCCL_CHECK=1.

    Attributes:
        context: The Context of the communicator.
        messages: The messages, in order.
    """

    context: Context
    messages: Sequence[Message] = ()

    def __call__(self) -> None:
        check_messages(self.context, self.messages)
        super().__call__()


class HostMessages(Messages):
    """See Messages."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # The messages of the open group, which are kept only under KCCL_CHECK=1.
        self._grouped: list[Message] = []
        # KcclMessage -> (view, array): keeps alive what C refers to. Requests are not kept here:
        # they refer to this object, which would make reference cycles.
        self._under_way: dict[Any, tuple[ArrayView, Any]] = {}
        self._most_under_way = _FEW
        self._waits: tuple[Any, Any] | None = None
        self._in_c: HostGroup | None = None

    def tag_of(self, tag: Any, *, receives: bool) -> int:
        """See Messages."""
        if tag is None and receives:
            return ANY
        return arguments.between("tag", tag, 0, _MOST_TAG)

    def channel_of(self, channel: Any) -> int:
        """See Messages."""
        number = super().channel_of(channel)
        if number != 0:
            raise InvalidArgument(
                f"channel is {number}, must be 0 on backend host: messages have tags there, which "
                "keep them apart"
            )
        return number

    def make(self, call: MessageCall, message: Message) -> None:
        """See Messages."""
        if call.is_for_c():
            # C must know the group before one is opened: it would make known calls within it at
            # once.
            call.learn_group(self._group)
        call.run(_fields(message), message)

    def prepare(self, call: MessageCall, message: Message, stream: Any) -> Prepared:
        """See Messages."""
        return call.prepared(message, _fields(message), stream)

    def start(self, message: Message) -> HostRequest:
        """See Messages."""
        handle = ffi.new("KcclMessage *")
        handle.address = message.view.address
        handle.num_bytes = message.view.nbytes
        handle.peer, handle.tag = message.peer, message.tag
        handle.receives = message.receives
        request = HostRequest(self, message.array, handle)
        context = self.context
        with context.alone():
            context.check_usable()
            if len(self._under_way) >= self._most_under_way:
                self._discard_forgotten()
            self._under_way[handle] = message.view, message.array
            lib.kccl_host_start_message(context.backend.context.messages, handle)
            context.check_usable()
        return request

    @property
    def _group(self) -> HostGroup:
        """Returns the group in which C collects messages. Only one is open at a time."""
        if self._in_c is None:
            self._in_c = self.prepared_group()
        return self._in_c

    def prepared_group(self) -> HostGroup:
        """See Messages."""
        handle = self.context.backend.call("recv")
        lib.kccl_host_bind_messages(handle)
        handle.bytes_per_count = 1
        facts = address_of(handle), handle, self.context.raise_failure
        if not self.context.checks:
            return HostGroup(*facts)
        group = CheckedGroup(*facts)
        group.context = self.context
        return group

    def begin_group(self) -> HostGroup:
        """See Messages."""
        group = self._group
        group.open()
        return group

    def add(self, call: MessageCall, message: Message) -> None:
        """See Messages. Teaches C to add later messages of this kind itself."""
        view = message.view
        kept = view, message.array
        self._group.add(
            *(view.address, view.nbytes, message.peer, message.tag, message.receives, kept)
        )
        if self.context.checks:
            self._grouped.append(message)
        else:
            call.teach(message, self._group)

    def truncate_group(self, count: int) -> None:
        """See Messages."""
        self._group.truncate(count)
        del self._grouped[count:]

    def end_group(self, prepared: Any, *, drops: bool) -> None:
        """See Messages."""
        group = self._group
        group.close()
        messages, self._grouped = self._grouped, []
        if drops:
            group.truncate(0)
        elif prepared is not None:
            group.move_to(prepared)
            if isinstance(prepared, CheckedGroup):
                prepared.messages = messages
        else:
            group.run()

    def discard(self, message: Any) -> None:
        """Drops the array of a message that is done."""
        self._under_way.pop(message, None)

    def _discard_forgotten(self) -> None:
        """Drops the arrays of done messages whose requests nobody has asked since."""
        self._under_way = {each: kept for each, kept in self._under_way.items() if not each.is_done}
        self._most_under_way = max(_FEW, 2 * len(self._under_way))

    def drop(self) -> None:
        """See Messages."""
        self._under_way.clear()
        if self._in_c is not None:
            self._in_c.drop()

    def _check_not_dropped(self, message: Any) -> None:
        if message not in self._under_way:
            raise self.dropped(receives=bool(message.receives), nbytes=message.num_bytes)

    def test(self, message: Any) -> None:
        """Makes progress on all messages under way. Raises if `message` was dropped."""
        context = self.context
        with context.alone():
            context.check_usable()
            self._check_not_dropped(message)
            lib.kccl_host_test_message(context.backend.context.messages, message)
            context.check_usable()

    def wait(self, message: Any) -> None:
        """Waits for a message."""
        context = self.context
        if self._waits is None:
            handle = context.backend.call("recv")
            lib.kccl_host_bind_message(handle)
            handle.bytes_per_count = 1
            op = fastcall.Op(address_of(handle), None, context.raise_failure)
            self._waits = handle, op
        handle, op = self._waits

        def fill() -> None:
            context.check_usable()
            self._check_not_dropped(message)
            handle.call.input = address_of(message)
            # C reads this length to decide whether it releases the GIL while it waits.
            handle.call.count = message.num_bytes

        op.after(fill)


def _fields(message: Message) -> dict[str, int]:
    """Returns KcclCall's fields for the message, as a call of the kernel send or recv."""
    field = "output" if message.receives else "input"
    where = {field: message.view.address, "peer": message.peer, "channel": message.tag}
    return {**where, "count": message.view.nbytes}
