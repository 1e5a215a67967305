"""Messages between ranks on GPUs, or on the simulated machine: calls of the kernel send_recv.

A call has at most one message to each peer and one from each. So a group is one call, unless it has
several messages to or from the same peer. Then it is several calls, one after another, in the order
of their tags.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..base import arguments
from ..base.abi import MAX_WORLD_SIZE, MOST_GPU_TAG, fastcall, message_head
from ..base.errors import InvalidArgument
from .context import Context
from .front import call_is_not_copied
from .gpu_sources import Source, Sources
from .messages import ANY, Message, MessageCall, Messages, Request, check_messages
from .prepared import Prepared, address_of

_KERNEL = "send_recv"
# Number of calls whose handles are kept. When there are more, all handles are dropped.
_KNOWN_CALLS = 1024


class GpuRequest(Request):
    """See Request."""

    def __init__(self, messages: "GpuMessages", message: Message) -> None:
        self._messages = messages
        self.message = message
        self.is_issued = False
        # Where the kernel writes from which rank the message is; None if the receive names one, or
        # is not issued.
        self.from_any: Source | None = None

    @property
    def is_done(self) -> bool:
        """See Request."""
        return self.is_issued

    @property
    def source(self) -> int | None:
        """See Request."""
        if self.from_any is not None:
            known = self.from_any.rank_and_tag()
            return known[0] if known is not None else None
        return self.message.peer if self.message.receives and self.is_issued else None

    @property
    def tag(self) -> int | None:
        """See Request."""
        if self.from_any is not None:
            known = self.from_any.rank_and_tag()
            return known[1] if known is not None else None
        message = self.message
        is_known = message.receives and self.is_issued and message.tag != ANY
        return message.tag if is_known else None

    def test(self) -> bool:
        """See Request."""
        if self.is_issued:
            self._messages.context.check_usable()
        else:
            self._messages.issue(self)
        return True

    def wait(self) -> Any:
        """See Request."""
        self.test()
        return self.message.array


class PreparedGroup:
    """Messages of a prepared group. Calling the object issues them together."""

    __reduce_ex__ = call_is_not_copied

    def __init__(self, messages: "GpuMessages") -> None:
        self.messages: list[Message] = []
        self._all = messages

    def __call__(self) -> None:
        """Issues the messages."""
        if self._all.context.checks:
            check_messages(self._all.context, self.messages)
        self._all.make_together(self.messages)


class GpuMessages(Messages):
    """See Messages."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Messages that isend() and irecv() have begun, and that no call of send_recv has issued
        # yet.
        self._begun: list[GpuRequest] = []
        self._grouped: list[Message] = []
        self._known: dict[Any, tuple[Any, Any]] = {}
        self._sources = Sources(context)

    def tag_of(self, tag: Any, *, receives: bool) -> int:
        """See Messages."""
        if tag is None and receives:
            return ANY
        return arguments.between("tag", tag, 0, MOST_GPU_TAG)

    def make(self, call: MessageCall, message: Message) -> None:
        """See Messages."""
        self.make_together([message])

    def begin_group(self) -> list[Message]:
        """See Messages."""
        self._grouped = []
        return self._grouped

    def add(self, call: MessageCall, message: Message) -> None:
        """See Messages."""
        self._grouped.append(message)

    def truncate_group(self, count: int) -> None:
        """See Messages."""
        del self._grouped[count:]

    def prepared_group(self) -> "PreparedGroup":
        """See Messages."""
        return PreparedGroup(self)

    def end_group(self, prepared: Any, *, drops: bool) -> None:
        """See Messages."""
        messages, self._grouped = self._grouped, []
        if drops:
            return
        if prepared is not None:
            self._by_stream(messages)
            prepared.messages = messages
        else:
            self.make_together(messages)

    def make_together(self, messages: list[Message]) -> None:
        """Issues messages, behind those that isend() and irecv() have begun."""
        self.context.check_usable()
        begun = [request.message for request in self._begun]
        for (stream, channel), (those, unnamed) in self._by_stream([*begun, *messages]).items():
            for call in _calls_of(those):
                self._run(call, stream, channel, unnamed)
                # Marks the messages of this call as issued at once, so that they are not issued
                # again if a later call of this loop cannot be launched.
                self._note_issued(call)

    def _by_stream(
        self, messages: Sequence[Message]
    ) -> dict[tuple[int, int], tuple[list[Message], int]]:
        """Returns, for each stream and channel, its messages and what _unnamed() says of them.

        Raises:
            InvalidArgument: They cannot be issued together; see _unnamed().
        """
        streams: dict[tuple[int, int], list[Message]] = {}
        for message in messages:
            streams.setdefault((message.stream, message.channel), []).append(message)
        return {where: (those, self._unnamed(those)) for where, those in streams.items()}

    def _unnamed(self, messages: Sequence[Message]) -> int:
        """Returns the ranks from which the messages' receives from any rank may receive, a bit
        each: those that no other receive names. All messages are of one stream and channel.

        Raises:
            InvalidArgument: There is such a receive, and no such rank. Or there are several, and
                sends: each of these receives is in another call, while all sends to different ranks
                are in the first. So ranks could wait for each other's calls in a circle.
        """
        ranks = (1 << self.context.world_size) - 1
        receives = [message for message in messages if message.receives]
        for message in receives:
            if message.peer != ANY:
                ranks &= ~(1 << message.peer)
        from_any = sum(message.peer == ANY for message in receives)
        if from_any > 1 and len(receives) < len(messages):
            raise InvalidArgument(
                f"peer is None in {from_any} receives that would be issued together with sends, "
                "on one stream and channel, must be in one at most: name the ranks, or issue these "
                "receives behind the sends, in groups of their own; nothing was sent"
            )
        if ranks == 0 and from_any:
            raise InvalidArgument(
                "peer is None in a receive of a group whose other receives name every rank: "
                "receives from any rank take messages of ranks that the group does not name"
            )
        return ranks

    def _note_issued(self, messages: list[Message]) -> None:
        issued = {id(message) for message in messages}
        for request in self._begun:
            request.is_issued |= id(request.message) in issued
        self._begun = [request for request in self._begun if not request.is_issued]

    def prepare(self, call: MessageCall, message: Message, stream: Any) -> Prepared:
        """See Messages."""
        unnamed = self._unnamed([message])
        fields = {
            **_fields([message], message.channel, unnamed),
            **_addresses([message], unnamed),
        }
        return call.prepared(message, fields, stream, _KERNEL)

    def start(self, message: Message) -> GpuRequest:
        """See Messages."""
        with self.context.alone():
            self.context.check_usable()
            # A message that the begun ones refuse is not begun: it would stop them all.
            self._by_stream([*(begun.message for begun in self._begun), message])
            request = GpuRequest(self, message)
            self._begun.append(request)
            return request

    def issue(self, request: GpuRequest) -> None:
        """Issues all messages that have been begun. `request` should be one of them."""
        self.context.check_usable()
        if request not in self._begun:
            message = request.message
            raise self.dropped(receives=message.receives, nbytes=message.view.nbytes)
        self.make_together([])

    def drop(self) -> None:
        """See Messages."""
        self._begun = []
        self._sources.forget()

    def _asks(self, messages: list[Message]) -> GpuRequest | None:
        """Returns the request that asks from which rank the call receives; None if none does."""
        for request in self._begun:
            message = request.message
            if message.receives and message.peer == ANY and any(message is x for x in messages):
                return request
        return None

    def _run(self, messages: list[Message], stream: int, channel: int, unnamed: int) -> None:
        context = self.context
        key = (
            channel,
            unnamed if any(each.peer == ANY for each in messages) else 0,
            *((each.receives, each.peer, each.view.nbytes, each.tag) for each in messages),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN_CALLS:
                self._known.clear()
            handle = context.backend.call(_KERNEL, **_fields(messages, channel, unnamed))
            known = handle, fastcall.Op(address_of(handle), None, context.raise_failure)
            self._known[key] = known
        handle, op = known
        asks = self._asks(messages)
        source = None
        if asks is not None:
            is_captured = context.backend.is_captured(stream)
            source = asks.from_any = self._sources.new(is_captured=is_captured)

        def fill() -> None:
            for name, addresses in _addresses(messages, unnamed).items():
                setattr(handle.call, name, addresses)
            handle.call.output = source.address if source is not None else 0
            context.backend.set_stream(handle, stream)

        try:
            op.after(fill)
        except BaseException:
            if asks is not None and source is not None:
                self._sources.give_back(source)
                asks.from_any = None
            raise


def _calls_of(messages: Iterable[Message]) -> list[list[Message]]:
    """Divides messages into successive calls, with at most one message to and from each peer. Two
    ranks may add them in different orders, so messages of one peer are sorted by their tags.
    """
    calls: list[list[Message]] = []
    numbers: dict[tuple[bool, int], int] = {}
    for message in sorted(messages, key=lambda message: message.tag):
        pair = message.receives, message.peer
        number = numbers[pair] = numbers.get(pair, -1) + 1
        if number == len(calls):
            calls.append([])
        calls[number].append(message)
    return calls


def _place(message: Message, unnamed: int) -> int:
    """Returns the rank at which a message stands in KcclCall's arrays: a receive from any rank at
    the lowest of the ranks from which it receives.
    """
    return (unnamed & -unnamed).bit_length() - 1 if message.peer == ANY else message.peer


def _fields(messages: list[Message], channel: int, unnamed: int) -> dict[str, Any]:
    """Returns KcclCall's fields, except the addresses, for a call with these messages."""
    heads = [0] * MAX_WORLD_SIZE, [0] * MAX_WORLD_SIZE
    bits = 0
    for each in messages:
        place = _place(each, unnamed)
        heads[each.receives][place] = message_head(each.view.nbytes, each.tag)
        bits |= 1 << each.receives * MAX_WORLD_SIZE + place
    count = sum(each.view.nbytes for each in messages)
    sends, receives = heads
    return {
        "sends": sends,
        "receives": receives,
        "messages": bits,
        "count": count,
        "channel": channel,
        "peer": unnamed if any(each.peer == ANY for each in messages) else 0,
    }


def _addresses(messages: list[Message], unnamed: int) -> dict[str, list[int]]:
    """Returns KcclCall's addresses for a call with these messages."""
    addresses = [0] * MAX_WORLD_SIZE, [0] * MAX_WORLD_SIZE
    for each in messages:
        addresses[each.receives][_place(each, unnamed)] = each.view.address
    send_from, receive_to = addresses
    return {"send_from": send_from, "receive_to": receive_to}
