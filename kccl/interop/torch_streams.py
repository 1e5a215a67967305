"""Orders a communicator's calls on PyTorch's streams, and gives asynchronous calls a stream beside
the program's.

The process has KCCL_STREAMS - 1 streams of its own on a GPU, which its communicators share. So with
the program's stream no more streams have calls than fit on a GPU beside each other. If KCCL_STREAMS
is 1, asynchronous calls run on the program's stream.

One capture into a CUDA graph at a time uses a stream of the process. Asynchronous calls that
another thread captures meanwhile run on that thread's current stream.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..base.errors import Error
from ..comm import Communicator
from . import torch_cuda
from .torch_cuda import Mark

_Pair = dict[bool, "torch.cuda.Stream"]


class Place(NamedTuple):
    """Where a call has been enqueued.

    Attributes:
        stream: The stream of the call.
        caller: The program's stream. It may be the same.
        mark: The end of the call on its stream; None if the call is not asynchronous.
    """

    stream: "torch.cuda.Stream"
    caller: "torch.cuda.Stream"
    mark: Mark | None


@dataclass(eq=False)
class _Fork:
    """One capture's use of a stream of the process. `origin` is the stream that it came from."""

    origin: "torch.cuda.Stream"


@dataclass(slots=True)
class _Last:
    """Where a communicator's last call is: on a stream, in a capture's use of it if it is one of
    the process's, and before a mark if one was made.
    """

    stream: "torch.cuda.Stream"
    fork: _Fork | None
    mark: Mark | None = None


@dataclass(eq=False, slots=True)
class _Calls:
    """The calls of one communicator on a GPU.

    Attributes:
        own: The pair of _own for asynchronous calls; None if they have none.
        leave_marks: Whether calls on the default stream that are not asynchronous leave marks, too.
            They do once calls were made on several streams: a mark takes less time than to ask
            about the stream.
        lasts: True -> the last call that was captured into a CUDA graph. False -> the last call
            that was not.
    """

    own: _Pair | None = None
    leave_marks: bool = False
    lasts: dict[bool, _Last] = field(default_factory=dict)


_calls: "WeakKeyDictionary[Communicator, _Calls]" = WeakKeyDictionary()
# (A GPU's number, the number of a stream) -> the stream for captured calls (True), and that for
# others (False). There are two because a thread may make calls while another one captures.
_own: dict[tuple[int, int], _Pair] = {}
# A stream of _own for captured calls -> its use by the last capture.
_forks: "dict[torch.cuda.Stream, _Fork]" = {}
_forking = threading.Lock()


def _calls_of(comm: Communicator) -> _Calls:
    found = _calls.get(comm)
    return found if found is not None else _calls.setdefault(comm, _Calls())


def give_stream(comm: Communicator, device: torch.device, streams: int) -> None:
    """Gives a new communicator a stream for its asynchronous calls, if `streams` is 2 or more: the
    one that the fewest open communicators have.

    Args:
        comm: The communicator.
        device: Its GPU, with a number.
        streams: KCCL_STREAMS, as the communicator has it.
    """
    if streams < 2:
        return
    places = [(device.index, number) for number in range(streams - 1)]
    held = [calls.own for calls in _calls.values() if calls.own is not None]
    place = min(places, key=lambda each: sum(pair is _own.get(each) for pair in held))
    if place not in _own:
        # The high priority lets a call begin although a kernel's blocks wait for multiprocessors.
        _own[place] = {is_captured: torch_cuda.new_stream(device) for is_captured in (False, True)}
    _calls_of(comm).own = _own[place]


def free_stream(comm: Communicator) -> None:
    """Says that a communicator makes no more asynchronous calls. Idempotent."""
    calls = _calls.get(comm)
    if calls is not None:
        calls.own = None


def enqueue(
    comm: Communicator,
    device: torch.device,
    call: Callable[[Communicator], Any],
    *,
    is_async: bool,
) -> Place:
    """Makes a call of a communicator on a GPU. Its stream waits for what is on the program's stream
    and for the communicator's last call, and is the current one meanwhile.

    Args:
        comm: The communicator.
        device: The GPU of the call's tensors.
        call: Makes the call on the communicator that it is given.
        is_async: Whether the call is asynchronous.
    """
    now = torch_cuda.current_stream(device.index)
    calls = _calls_of(comm)
    # The default stream cannot be captured.
    if is_async and calls.own is not None and now.cuda_stream == 0:
        return _enqueue_beside(comm, calls, calls.own[False], now, call)
    is_capturing = torch_cuda.is_capturing(now)
    own = calls.own[is_capturing] if is_async and calls.own is not None else now
    if own is now or not _fork(own, now, is_capturing):
        last = _order(calls, now, is_capturing)
        try:
            call(comm)
        finally:
            # A call that fails may have enqueued something, and the next one waits for it, too.
            needs_mark = is_async or _needs_mark(calls, now, is_capturing)
            mark = _marked(last, is_capturing) if needs_mark else None
        return Place(now, now, mark)
    try:
        with torch_cuda.On(own, now):
            last = _order(calls, own, is_capturing, behind=now)
            call(comm)
        return Place(own, now, _marked(last, is_capturing))
    except BaseException:
        # Nobody gets a Work to wait for, but a capture can only end if all its streams are joined.
        now.wait_stream(own)
        raise


def _enqueue_beside(
    comm: Communicator,
    calls: _Calls,
    own: "torch.cuda.Stream",
    now: "torch.cuda.Stream",
    call: Callable[[Communicator], Any],
) -> Place:
    """Does what enqueue() does for an asynchronous call beside the default stream, in few calls of
    Python. Those of a step of DistributedDataParallel are such calls.
    """
    mark = Mark(now)
    mark.event.wait(own)
    last, made = calls.lasts.get(False), _Last(own, None)
    calls.lasts[False] = made
    device_index = torch._C._cuda_getDevice()
    torch_cuda.set_stream(own)
    try:
        if last is not None and last.stream is not own and last.stream is not now:
            _follow(calls, last, own, is_capturing=False)
        call(comm)
        # `own` waits for the first use of the event already, so it can be recorded again.
        mark.event.record(own)
        made.mark = mark
    except BaseException:
        # Nobody gets a Work to wait for. So the program's stream waits for what was enqueued.
        now.wait_stream(own)
        raise
    finally:
        torch_cuda.set_stream(now)
        # To set a stream makes its GPU the current one, too.
        if device_index != own.device_index:
            torch._C._cuda_setDevice(device_index)
    return Place(own, now, mark)


def _needs_mark(calls: _Calls, now: "torch.cuda.Stream", is_capturing: bool) -> bool:
    """Tells whether a call that is not asynchronous must leave a mark on its stream, so that the
    next one can wait for it on another stream. When a capture has begun on the first stream, it is
    too late to mark it. The default stream cannot be captured.
    """
    return not is_capturing and (calls.leave_marks or now.cuda_stream != 0)


def _marked(last: _Last, is_capturing: bool) -> Mark:
    """Marks the end of the last call on its stream."""
    mark = Mark(last.stream, is_capturing)
    if not is_capturing:
        # So the next call does not wait for later calls of others on this stream.
        last.mark = mark
    return mark


def _fork(own: "torch.cuda.Stream", now: "torch.cuda.Stream", is_capturing: bool) -> bool:
    """Makes a stream of the process wait for the current one.

    Returns:
        False, and nothing is done, if the current stream is captured, and a capture that began on
        another stream has the stream of the process now.
    """
    if not is_capturing:
        torch_cuda.wait_for(own, now, is_capturing)
        return True
    with _forking:
        if not _is_captured(own):
            _forks[own] = _Fork(now)
        elif own not in _forks or _forks[own].origin is not now:
            return False
        torch_cuda.wait_for(own, now, is_capturing)
    return True


class Ordered:
    """A context for a call on the current stream, which waits for the communicator's last call on
    another stream.

    Every call needs it: calls on one channel must not overlap, but programs of PyTorch change
    streams freely.
    """

    __slots__ = ("_calls", "_is_capturing", "_last")

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        """Makes the stream wait, unless the tensors are on the host, which has no streams.

        Args:
            comm: The communicator.
            device: The device of the call's tensors.
        """
        self._last: _Last | None = None
        if device.type == "cuda":
            now = torch_cuda.current_stream(device.index)
            self._calls, self._is_capturing = _calls_of(comm), torch_cuda.is_capturing(now)
            self._last = _order(self._calls, now, self._is_capturing)

    def __enter__(self) -> None:
        """Does nothing: the stream waits already."""

    def __exit__(self, *_: object) -> None:
        last = self._last
        if last is not None and _needs_mark(self._calls, last.stream, self._is_capturing):
            _marked(last, self._is_capturing)


def _order(
    calls: _Calls,
    now: "torch.cuda.Stream",
    is_capturing: bool,
    behind: "torch.cuda.Stream | None" = None,
) -> _Last:
    """Makes the current stream wait for the last call on another stream.

    Args:
        calls: The communicator's calls.
        now: The current stream.
        is_capturing: Whether it is captured.
        behind: A stream that it waits for already.

    Returns:
        Where the next call is.
    """
    last = calls.lasts.get(is_capturing)
    if last is not None and last.stream is not now and last.stream is not behind:
        _follow(calls, last, now, is_capturing=is_capturing)
    made = calls.lasts[is_capturing] = _Last(now, _forks.get(now) if is_capturing else None)
    return made


def _follow(calls: _Calls, last: _Last, now: "torch.cuda.Stream", *, is_capturing: bool) -> None:
    """Makes a stream wait for the communicator's last call, which is on another one."""
    if last.mark is not None:
        last.mark.event.wait(now)
    # A stream that is being captured cannot wait for one that is not, nor the other way round: the
    # graph runs later, on the stream of its replay. Nor for one in another capture.
    elif _is_captured(last.stream) == is_capturing and (
        not is_capturing or last.fork is _forks.get(last.stream)
    ):
        torch_cuda.wait_for(now, last.stream, is_capturing)
        calls.leave_marks = True


def _is_captured(stream: "torch.cuda.Stream") -> bool:
    """Tells whether a stream, current or not, is captured into a CUDA graph."""
    with torch_cuda.On(stream):
        return torch_cuda.is_capturing(stream)


def refuse_capture(device: torch.device, what: str) -> None:
    """Checks that a communicator can be made now.

    Raises:
        Error: The current stream is being captured into a CUDA graph.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Error(
            f"{what} has no communicator for {device} yet, and none can be made while a CUDA graph "
            "is captured: make one call before the capture"
        )
