"""Shows a group's calls in a trace of torch.profiler: kccl:all_reduce, as nccl:all_reduce."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

if TYPE_CHECKING:
    from .torch_messages import Call


def is_on() -> bool:
    """Tells whether a profiler records. A program without one pays for nothing but this."""
    return bool(profiler._is_profiler_enabled)


def recorded(call: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Returns `call` with a range around it in the trace. It begins now, and ends when the call has
    been made, also on another thread. On a GPU the call has been enqueued then, as with NCCL.

    Args:
        call: Makes a collective. It must be called once.
        name: The collective's name; that of the file of `call` if it is empty.
    """
    shown = profiler.record_function(f"kccl:{name or call.__module__.rpartition('.')[2]}")
    shown.__enter__()

    def make(*args: Any) -> Any:
        try:
            return call(*args)
        finally:
            shown.__exit__(None, None, None)

    return make


def name_of(calls: Sequence["Call"], rank: int) -> str:
    """Returns the name of messages that are begun together, in NCCL's words."""
    if len(calls) != 1:
        return "coalesced"
    (call,) = calls
    if call.peer is None:
        return "recvAnySource"
    return f"recv {rank}<-{call.peer}" if call.receives else f"send {rank}->{call.peer}"
