"""PyTorch's current stream on a GPU, and events, with few calls of Python.

A call of a process group needs them several times. In a step of a model its code is not in the
processor's caches, and the wrappers in torch.cuda took more time than the launch of the kernel.
"""

from types import TracebackType

import torch

from ..base.errors import Error

# (stream_id, device_index, device_type) -> the only object for this stream here, so that streams
# can be compared with `is`. PyTorch makes a new object at each question for the current stream.
_streams: "dict[tuple[int, int, int], torch.cuda.Stream]" = {}


def _only(key: tuple[int, int, int]) -> "torch.cuda.Stream":
    """Returns the object for a stream."""
    found = _streams.get(key)
    if found is None:
        stream_id, device_index, device_type = key
        made = torch.cuda.Stream(
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
        found = _streams.setdefault(key, made)
    return found


def new_stream(device: torch.device) -> "torch.cuda.Stream":
    """Returns a stream of high priority."""
    made = torch.cuda.Stream(device, priority=-1)
    return _only((made.stream_id, made.device_index, made.device_type))


def current_stream(device_index: int) -> "torch.cuda.Stream":
    """Returns the current stream of a GPU: the same object for the same stream."""
    key = torch._C._cuda_getCurrentStream(device_index)
    return _streams.get(key) or _only(key)


def is_capturing(now: "torch.cuda.Stream") -> bool:
    """Tells whether `now`, which must be the current stream, is captured into a CUDA graph."""
    # The legacy default stream cannot be captured, and CUDA refuses to be asked about this stream
    # while another one is being captured.
    return now.cuda_stream != 0 and bool(torch._C._cuda_isCurrentStreamCapturing())


class On:
    """A context in which a stream is the current one of its GPU, as torch.cuda.stream() makes.
    `now` is the stream that is the current one of this GPU; asked for if not given.
    """

    __slots__ = ("_before", "_device_index", "_stream")

    def __init__(self, stream: "torch.cuda.Stream", now: "torch.cuda.Stream | None" = None) -> None:
        self._stream = stream
        self._before = now or current_stream(stream.device_index)

    def __enter__(self) -> None:
        self._device_index = torch._C._cuda_getDevice()
        set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        set_stream(self._before)
        # To set a stream makes its GPU the current one, too.
        if self._device_index != self._stream.device_index:
            torch._C._cuda_setDevice(self._device_index)


def check(device_index: int) -> None:
    """Checks that PyTorch has the functions of C that this file calls, as they are called here.

    Raises:
        Error: One is missing, or is called in another way.
    """
    # PyTorch's functions of C do not initialise it, and a program may have no tensor yet.
    torch.cuda.init()
    try:
        now = current_stream(device_index)
        with On(now):
            is_capturing(now)
        wait_for(now, now, False)
        torch._C.Future([torch.device("cuda", device_index)])
        # On the default stream of the current GPU these are not called.
        for name in ("_cuda_isCurrentStreamCapturing", "_cuda_setDevice"):
            getattr(torch._C, name)
    except (AttributeError, TypeError, ValueError) as error:
        raise Error(
            f"PyTorch {torch.__version__} has other functions for streams of GPUs than those that "
            f"KCCL calls ({error}): use an earlier version, from 2.11 on"
        ) from error


def set_stream(stream: "torch.cuda.Stream") -> None:
    """Makes a stream the current one of its GPU, and this GPU the current one."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


# A GPU's number -> events that nobody waits for any more. They are of the base class in C, whose
# methods run no Python.
_free: "dict[int, list[torch._C._CudaEventBase]]" = {}


class Mark:
    """What is on a stream now, for others to wait for. Its event is used again when nothing refers
    to the mark any more: it takes a third of a new event's time to record it again.
    """

    __slots__ = ("_pool", "event")

    def __init__(self, stream: "torch.cuda.Stream", is_captured: bool = False) -> None:
        """Records an event on the stream. An event of a capture stays one of its graph, so it is
        not used again.
        """
        pool = None if is_captured else _free.setdefault(stream.device_index, [])
        # Another thread may take the last one after the question.
        try:
            self.event = pool.pop() if pool else torch._C._CudaEventBase()
        except IndexError:
            self.event = torch._C._CudaEventBase()
        self.event.record(stream)
        # Last, so that __del__ gives back no event that could not be made or recorded.
        self._pool = pool

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.append(self.event)


def wait_for(waits: "torch.cuda.Stream", stream: "torch.cuda.Stream", is_captured: bool) -> None:
    """Makes a stream wait for what is on another one of the same GPU, as wait_stream() does."""
    # The mark is kept meanwhile: else another thread may record its event again.
    mark = Mark(stream, is_captured)
    mark.event.wait(waits)
