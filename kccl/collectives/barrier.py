"""barrier: returns on no rank before all ranks have called it."""

import weakref
from functools import partial
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, NoReturn

from ..base import arguments
from ..plan.choice import Plan
from .context import Context
from .prepared import Checked, CheckedOnStream, Prepared, prepared
from .written import NOTHING


class Barrier(Prepared):
    """barrier(): returns when every rank has called it.

    Puts and ordinary stores before it, on any rank, are visible after it on all ranks. On a GPU it
    takes `stream`, is enqueued on it, and orders the work on that stream.
    """

    def _refuse(self, *args: Any, **keywords: Any) -> NoReturn:
        given = ", ".join([*map(repr, args), *(f"{name}={x!r}" for name, x in keywords.items())])
        backend = self._context.backend
        takes = "the keyword stream only" if backend.has_streams else "no arguments"
        raise TypeError(
            f"barrier({given}): on backend {backend.name} barrier() takes {takes}; a barrier on "
            "another channel is prepared: op = comm.barrier.prepare(channel=1), then op()"
        )

    @staticmethod
    def of(context: Context) -> "Barrier":
        """Returns a communicator's barrier, on channel 0."""
        return _on_channel_0(context)

    def forget(self) -> None:
        """Does nothing. (The other collectives drop here the calls that they have taught to C; see
        collective.py.)
        """

    @property
    def __signature__(self) -> Signature:
        """Returns the signature of the call, for inspect."""
        stream = Parameter("stream", Parameter.KEYWORD_ONLY, default=None)
        return Signature([stream] if self._context.backend.has_streams else [])

    if TYPE_CHECKING:
        # On the host C answers the call, and it takes no arguments.
        def __call__(self, *, stream: Any = None) -> None: ...

    def prepare(self, *, stream: Any = None, channel: int = 0) -> Prepared:
        """Prepares a barrier on a channel and, on a GPU, a stream. `op()` on the result runs it."""
        self._context.backend.stream(stream, None)  # checks the argument
        self._context.check_usable()
        plan, handle, signature = _on_channel(self._context, channel)
        return prepared(self._context, signature, plan, handle, None, (), stream)


class CheckedBarrier(Checked, Barrier):
    """The barrier of a communicator on the host under KCCL_CHECK=1."""


class BarrierOnStream(CheckedOnStream, Barrier):
    """The barrier of a communicator on a GPU. It is enqueued on a stream."""

    def __init__(self, signature: str, context: Context, plan: Plan, handle: Any) -> None:
        self._given: Any = None
        # A weak reference to this object, because C keeps it: a bound method would make a reference
        # cycle, as in Collective.
        me: Any = weakref.proxy(self)
        now = partial(BarrierOnStream._now, me)
        super().__init__("barrier", signature, NOTHING, (), context, plan, handle, None, None, now)

    def __call__(self, *args: Any, stream: Any = None, **keywords: Any) -> Any:
        if args or keywords:
            self._refuse(*args, **keywords)

        def fill() -> None:
            self._context.check_agreement(self._signature)
            self._given = stream

        return self.after(fill)

    def _now(self) -> int:
        given, self._given = self._given, None
        return self._context.backend.stream(given, None)


def _on_channel_0(context: Context) -> Barrier:
    plan, handle, signature = _on_channel(context, 0)
    if context.backend.has_streams:
        return BarrierOnStream(signature, context, plan, handle)
    if context.checks:
        return CheckedBarrier("barrier", signature, NOTHING, (), context, plan, handle, None, None)
    return Barrier(context, plan, handle, None, None)


def _on_channel(context: Context, channel: int) -> tuple[Plan, Any, str]:
    channel = arguments.between("channel", channel, 0, context.num_channels - 1)
    plan = context.plan("barrier")
    handle = plan.handle(context.backend, channel=channel)
    return plan, handle, f"barrier, channel {channel}, {plan.name}"
