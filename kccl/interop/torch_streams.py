"""Orders a communicator's calls on PyTorch's streams, and gives asynchronous calls a stream beside
the program's.

The process has KCCL_STREAMS - 1 streams of its own on a GPU, which its communicators share. So with
the program's stream no more streams have calls than fit on a GPU beside each other. If KCCL_STREAMS
is 1, asynchronous calls run on the program's stream.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from ..base.errors import Error
from ..comm import Communicator

# Communicator -> the streams of its last calls on a GPU. True -> that of the last call that was
# captured into a CUDA graph. False -> that of the last call that was not.
_streams: "WeakKeyDictionary[Communicator, dict[bool, torch.cuda.Stream]]" = WeakKeyDictionary()

_Pair = dict[bool, "torch.cuda.Stream"]
# (A GPU's number, the number of a stream) -> the stream for captured calls (True), and that for
# others (False). There are two because a thread may make calls while another one captures.
_own: dict[tuple[int, int], _Pair] = {}
# Communicator -> its pair of _own.
_own_of: "WeakKeyDictionary[Communicator, _Pair]" = WeakKeyDictionary()
_given = itertools.count()


def give_stream(comm: Communicator, device: torch.device, streams: int) -> None:
    """Gives a new communicator a stream for its asynchronous calls, if `streams` is 2 or more.

    Args:
        comm: The communicator.
        device: Its GPU, with a number.
        streams: KCCL_STREAMS, as the communicator has it.
    """
    if streams < 2:
        return
    place = device.index, next(_given) % (streams - 1)
    if place not in _own:
        # The high priority lets a call begin although a kernel's blocks wait for multiprocessors.
        _own[place] = {
            is_captured: torch.cuda.Stream(device, priority=-1) for is_captured in (False, True)
        }
    _own_of[comm] = _own[place]


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
        own = _own_of[comm][_is_capturing(now)]
    if own is None or own == now:
        order(comm, device)
        yield now, now
        return
    own.wait_stream(now)
    try:
        with torch.cuda.stream(own):
            order(comm, device, behind=now)
            yield own, now
    except BaseException:
        # Nobody gets a Work to wait for, but a capture can only end if all its streams are joined.
        now.wait_stream(own)
        raise


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
    streams = _streams.setdefault(comm, {})
    last = streams.get(is_capturing, now)
    # A stream that is being captured cannot wait for one that is not, nor the other way round: the
    # graph runs later, on the stream of its replay.
    if last not in (now, behind) and _is_capturing(last) == is_capturing:
        now.wait_stream(last)
    streams[is_capturing] = now
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
