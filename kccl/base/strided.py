"""Arrays that are not C-contiguous: a call takes a copy of them, as its caller would make it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgument


@dataclass(frozen=True)
class Copied:
    """A C-contiguous copy of a caller's array.

    Attributes:
        array: The copy, an array of the same library or of NumPy.
        store: Copies it back into the caller's array.
    """

    array: Any
    store: Callable[[], object]


def on_host(array: Any, name: str, *, is_written: bool, stream: Any) -> Copied | None:
    """Returns a copy of an array in host memory; None if its library and NumPy make none.

    Args:
        array: An array whose view is refused only because it is not C-contiguous.
        name: Name of the argument, for error messages.
        is_written: True if the call writes the array.
        stream: None; the host has no streams.

    Raises:
        InvalidArgument: The call writes the array, and elements of it share memory.
    """
    import numpy as np

    if is_of_torch(array):
        return of_torch(array, name, is_written=is_written)
    has_buffer = isinstance(array, memoryview) or not hasattr(array, "__dlpack__")
    try:
        source = np.asarray(array) if has_buffer else np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return None  # NumPy lacks its type.
    if is_written:
        check_apart(name, source.shape, source.strides, source.itemsize)
    copy = np.array(source, order="C")
    return Copied(copy, lambda: np.copyto(source, copy))


def is_of_torch(array: Any) -> bool:
    """Tells whether an array is a tensor of PyTorch's."""
    return hasattr(array, "contiguous") and hasattr(array, "copy_")


def of_torch(tensor: Any, name: str, *, is_written: bool) -> Copied:
    """Does what on_host() does, with a tensor on any device, on PyTorch's current stream."""
    if is_written:
        check_apart(name, tuple(tensor.shape), tensor.stride(), 1)
    copy = tensor.contiguous()
    return Copied(copy, lambda: tensor.copy_(copy))


def check_apart(name: str, shape: Sequence[int], strides: Sequence[int], unit: int) -> None:
    """Checks that no two elements of an array share memory.

    Args:
        name: Name of the argument.
        shape: Its shape in elements.
        strides: For each dimension the distance of neighbours.
        unit: The size of an element, in the unit of the strides.

    Raises:
        InvalidArgument: They do, or their strides do not tell.
    """
    end = unit
    dimensions = sorted(zip(map(abs, strides), shape, strict=True))
    for stride, size in dimensions:
        if size > 1 and stride < end:
            raise InvalidArgument(
                f"{name} has strides {tuple(strides)} and shape {tuple(shape)}: elements may share "
                "memory, must lie apart where a call writes them"
            )
        end = max(end, (size - 1) * stride + end)
