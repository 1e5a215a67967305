"""Arrays in GPU memory that are not C-contiguous: their library copies them, on a call's stream."""

import sys
from contextlib import nullcontext
from typing import Any

from ..base import strided
from ..base.strided import Copied
from . import driver
from .arrays import stream_of


def copied(array: Any, name: str, *, is_written: bool, stream: Any) -> Copied | None:
    """Returns a copy of an array; None if its library is neither PyTorch nor CuPy.

    The library makes the copy on the stream of the call, and copies it back there. Its memory
    belongs to that stream, so a later array of the library gets it in the stream's order.

    Args:
        array: An array whose view is refused only because it is not C-contiguous.
        name, is_written: As in strided.on_host().
        stream: The stream that the caller gave to the call; None for the library's current one.

    Raises:
        InvalidArgument: The call writes the array, and elements of it share memory.
    """
    if strided.is_of_torch(array):
        return _by_torch(array, name, is_written, stream)
    if type(array).__module__.partition(".")[0] == "cupy":
        return _by_cupy(array, name, is_written, stream)
    return None


def _by_torch(tensor: Any, name: str, is_written: bool, stream: Any) -> Copied:
    torch = sys.modules["torch"]

    def on_stream() -> Any:
        if stream is None:
            return nullcontext()
        handle = stream_of(stream)
        if handle in (0, driver.legacy_stream()):
            return torch.cuda.stream(torch.cuda.default_stream(tensor.device))
        return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=tensor.device))

    with on_stream():
        made = strided.of_torch(tensor, name, is_written=is_written)

    def store() -> None:
        with on_stream():
            made.store()

    return Copied(made.array, store)


def _by_cupy(array: Any, name: str, is_written: bool, stream: Any) -> Copied:
    cupy = sys.modules["cupy"]
    if is_written:
        strided.check_apart(name, array.shape, array.strides, array.itemsize)

    def on_stream() -> Any:
        return nullcontext() if stream is None else cupy.cuda.ExternalStream(stream_of(stream))

    with array.device, on_stream():
        copy = cupy.ascontiguousarray(array)

    def store() -> None:
        with array.device, on_stream():
            array[...] = copy

    return Copied(copy, store)
