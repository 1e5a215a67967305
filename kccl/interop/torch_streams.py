"""Orders a communicator's calls on PyTorch's streams, and gives asynchronous calls a stream beside
the program's.

The process has KCCL_STREAMS - 1 streams of its own on a GPU, which its communicators share. So with
the program's stream no more streams have calls than fit on a GPU beside each other. If KCCL_STREAMS
is 1, asynchronous calls run on the program's stream.

One capture into a CUDA graph at a time uses a stream of the process. Asynchronous calls that
another thread captures meanwhile run on that thread's current stream.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from ..base.errors import Error
from ..comm import Communicator


@dataclass(eq=False)
class _Fork:
    """One capture's use of a stream of the process. `origin` is the stream that it came from."""

    origin: "torch.cuda.Stream"


@dataclass
class _Last:
    """Where a communicator's last call is: on a stream, in a capture's use of it if it is one of
    the process's, and before an event if one was recorded.
    """

    stream: "torch.cuda.Stream"
    fork: _Fork | None
    event: "torch.cuda.Event | None" = None


# Communicator -> its last calls on a GPU. True -> the last call that was captured into a CUDA
# graph. False -> the last call that was not.
_lasts: "WeakKeyDictionary[Communicator, dict[bool, _Last]]" = WeakKeyDictionary()

_Pair = dict[bool, "torch.cuda.Stream"]
# (A GPU's number, the number of a stream) -> the stream for captured calls (True), and that for
# others (False). There are two because a thread may make calls while another one captures.
_own: dict[tuple[int, int], _Pair] = {}
# Open communicator -> its pair of _own.
_own_of: "WeakKeyDictionary[Communicator, _Pair]" = WeakKeyDictionary()
# A stream of _own for captured calls -> its use by the last capture.
_forks: "dict[torch.cuda.Stream, _Fork]" = {}
_forking = threading.Lock()


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
    held = list(_own_of.values())
    place = min(places, key=lambda each: sum(pair is _own.get(each) for pair in held))
    if place not in _own:
        # The high priority lets a call begin although a kernel's blocks wait for multiprocessors.
        _own[place] = {
            is_captured: torch.cuda.Stream(device, priority=-1) for is_captured in (False, True)
        }
    _own_of[comm] = _own[place]


def free_stream(comm: Communicator) -> None:
    """Says that a communicator makes no more asynchronous calls. Idempotent."""
    _own_of.pop(comm, None)


@contextmanager
def stream_of_call(
    comm: Communicator, device: torch.device, *, is_async: bool
) -> "Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]":
    """Returns a context for one call of a communicator on a GPU. In it the current stream is that
    of the call. This stream waits for what is on the program's stream, and for the communicator's
    last call.

    Yields:
        The stream of the call, and the program's stream. They may be the same.
    """
    now = torch.cuda.current_stream(device)
    own = None
    if is_async and comm in _own_of:
        is_capturing = _is_capturing(now)
        own = _own_of[comm][is_capturing]
    if own is None or own == now or not _fork(own, now, is_capturing):
        order(comm, device)
        yield now, now
        return
    try:
        with torch.cuda.stream(own):
            order(comm, device, behind=now)
            yield own, now
            if not is_capturing:
                # Later calls of others on this stream are not to be waited for.
                _lasts[comm][False].event = own.record_event()
    except BaseException:
        # Nobody gets a Work to wait for, but a capture can only end if all its streams are joined.
        now.wait_stream(own)
        raise


def _fork(own: "torch.cuda.Stream", now: "torch.cuda.Stream", is_capturing: bool) -> bool:
    """Makes a stream of the process wait for the current one.

    Returns:
        False, and nothing is done, if the current stream is captured, and a capture that began on
        another stream has the stream of the process now.
    """
    if not is_capturing:
        own.wait_stream(now)
        return True
    with _forking:
        if not _is_capturing(own):
            _forks[own] = _Fork(now)
        elif own not in _forks or _forks[own].origin != now:
            return False
        own.wait_stream(now)
    return True


def order(
    comm: Communicator, device: torch.device, behind: "torch.cuda.Stream | None" = None
) -> "torch.cuda.Stream | None":
    """Makes the current stream wait for the communicator's last call on another stream.

    Must be called before every call: calls on one channel must not overlap, but programs of PyTorch
    change streams freely.

    Args:
        comm: The communicator.
        device: The device of the call's tensors.
        behind: A stream that the current one waits for already.

    Returns:
        The current stream of the device; None for the host, which has no streams.
    """
    if device.type != "cuda":
        return None
    now = torch.cuda.current_stream(device)
    is_capturing = _is_capturing(now)
    lasts = _lasts.setdefault(comm, {})
    last = lasts.get(is_capturing)
    if last is not None and last.stream not in (now, behind):
        if last.event is not None:
            now.wait_event(last.event)
        # A stream that is being captured cannot wait for one that is not, nor the other way round:
        # the graph runs later, on the stream of its replay. Nor for one in another capture.
        elif _is_capturing(last.stream) == is_capturing and last.fork is _forks.get(last.stream):
            now.wait_stream(last.stream)
    lasts[is_capturing] = _Last(now, _forks.get(now))
    return now


def _is_capturing(stream: "torch.cuda.Stream") -> bool:
    # The legacy default stream cannot be captured, and CUDA refuses to be asked about this stream
    # while another one is being captured.
    if stream.cuda_stream == 0:
        return False
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


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
