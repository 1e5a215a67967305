"""Arrays in GPU memory that are not C-contiguous: their library copies them, on a call's stream."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from ..base import strided
from ..base.strided import Copied
from . import arrays, driver


def copied(given: Mapping[str, Any], name: str, *, is_written: bool) -> Copied | None:
    """Returns a copy of an array; None if its library is neither PyTorch nor CuPy.

    The library makes the copy on the stream of the call, and copies it back there. Its memory
    belongs to that stream, so a later array of the library gets it in the stream's order.

    Args:
        given, name, is_written: As in strided.on_host().

    Raises:
        InvalidArgument: As in strided.on_host().
    """
    array = given[name]
    strided.check_overlaps(given, name, partial(arrays.view, device=None), _memory)
    if strided.is_of_torch(array):
        return _by_torch(array, name, is_written, _stream(given))
    if arrays.library(array) == "cupy":
        return _by_cupy(array, name, is_written, _stream(given))
    return None


def _stream(given: Mapping[str, Any]) -> int:
    """Returns the stream of a call: the one that its caller gave, else that of its first array,
    which may be of another library than the array that is copied.
    """
    if given.get("stream") is not None:
        return arrays.stream_of(given["stream"])
    first = given["x"] if given.get("x") is not None else given["out"]
    return arrays.current_stream(first)


def _memory(array: Any) -> Any:
    if strided.is_of_torch(array):
        return strided.memory_of_torch(array)
    if arrays.library(array) == "cupy":
        return strided.memory(array.data.ptr, array.shape, array.strides, array.itemsize)
    return None


def _by_torch(tensor: Any, name: str, is_written: bool, stream: int) -> Copied:
    torch = sys.modules["torch"]

    def on_stream() -> Any:
        if stream == arrays.current_stream(tensor):
            return nullcontext()
        if stream in (0, driver.legacy_stream()):
            return torch.cuda.stream(torch.cuda.default_stream(tensor.device))
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=tensor.device))

    with on_stream():
        made = strided.of_torch(tensor, name, is_written=is_written)

    def store() -> None:
        with on_stream():
            made.store()

    return Copied(made.array, store, is_written)


def _by_cupy(array: Any, name: str, is_written: bool, stream: int) -> Copied:
    cupy = sys.modules["cupy"]
    if is_written:
        strided.check_apart(name, array.shape, array.strides, array.itemsize)

    def on_stream() -> Any:
        if stream == arrays.current_stream(array):
            return nullcontext()
        return cupy.cuda.ExternalStream(stream)

    with array.device, on_stream():
        copy = cupy.ascontiguousarray(array)

    def store() -> None:
        with array.device, on_stream():
            array[...] = copy

    return Copied(copy, store, is_written)
