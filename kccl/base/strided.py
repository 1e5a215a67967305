"""Arrays that are not C-contiguous: a call takes a copy of them, as its caller would make it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import arrays
from .errors import InvalidArgument, NotContiguous

# The arrays of a call, by the names of their arguments.
_ARRAYS = ("x", "residual", "weight", "scale", "out")
# How many cases np.may_share_memory() tries before it takes two arrays to overlap.
_MOST_WORK = 10_000


@dataclass(frozen=True)
class Copied:
    """A C-contiguous copy of a caller's array.

    Attributes:
        array: The copy, an array of the same library or of NumPy.
        store: Copies it back into the caller's array.
        is_written: True if the call writes the array, so that store() follows it.
    """

    array: Any
    store: Callable[[], object]
    is_written: bool


def on_host(given: Mapping[str, Any], name: str, *, is_written: bool) -> Copied | None:
    """Returns a copy of an array in host memory; None if its library and NumPy make none.

    Args:
        given: The arguments of the call, as its caller gave them.
        name: Name of the argument whose view is refused only because it is not C-contiguous.
        is_written: True if the call writes the array.

    Raises:
        InvalidArgument: The call writes the array, and it is read-only, or elements of it share
            memory. Or it overlaps another array; see check_overlaps().
    """
    import numpy as np

    array = given[name]
    check_overlaps(given, name, arrays.view, _memory_on_host)
    if is_of_torch(array):
        return of_torch(array, name, is_written=is_written)
    source = _as_numpy(array)
    if source is None:
        return None
    if is_written:
        if not source.flags.writeable:
            raise InvalidArgument(f"{name} is read-only, must be writable")
        check_apart(name, source.shape, source.strides, source.itemsize)
    copy = np.array(source, order="C")
    return Copied(copy, lambda: np.copyto(source, copy), is_written)


def _as_numpy(array: Any) -> Any:
    """Returns a NumPy array of the same memory; None if NumPy makes none.

    NumPy takes its own arrays by DLPack, too, but not those of all types, and before version 2.1 as
    read-only ones.
    """
    import numpy as np

    try:
        return np.asarray(array) if arrays.has_buffer(array) else np.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None


def _memory_on_host(array: Any) -> Any:
    return memory_of_torch(array) if is_of_torch(array) else _as_numpy(array)


def is_of_torch(array: Any) -> bool:
    """Tells whether an array is a tensor of PyTorch's."""
    return hasattr(array, "contiguous") and hasattr(array, "copy_")


def of_torch(tensor: Any, name: str, *, is_written: bool) -> Copied:
    """Returns a copy of a tensor on any device, made on PyTorch's current stream. It is no part of
    a graph of autograd's.

    Raises:
        InvalidArgument: The call writes the tensor, and elements of it share memory.
    """
    torch = sys.modules["torch"]
    if is_written:
        check_apart(name, tuple(tensor.shape), tensor.stride(), 1)
    with torch.no_grad():
        copy = tensor.detach().contiguous()

    def store() -> None:
        # Elsewhere PyTorch refuses to write inference tensors, and leaves that require grad. The
        # calls write all tensors.
        with torch.inference_mode():
            tensor.copy_(copy)

    return Copied(copy, store, is_written)


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
            ) from None
        end = max(end, (size - 1) * stride + end)


class _Memory:
    """Memory that NumPy takes for an array, to compare it with others. It is not accessed."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{itemsize}",
        }


def memory(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Any:
    """Returns a NumPy array for check_overlaps(), of memory on any device. Strides are in bytes."""
    import numpy as np

    if 0 in shape:
        return np.empty(0)
    return np.asarray(_Memory(address, shape, strides, itemsize))


def memory_of_torch(tensor: Any) -> Any:
    """Returns a tensor's memory; see memory()."""
    itemsize = tensor.element_size()
    strides = [each * itemsize for each in tensor.stride()]
    return memory(tensor.data_ptr(), tuple(tensor.shape), strides, itemsize)


def check_overlaps(
    given: Mapping[str, Any],
    name: str,
    view: Callable[..., arrays.ArrayView],
    memory_of: Callable[[Any], Any],
) -> None:
    """Checks that an array overlaps no other one of its call, if the call writes one of the two.

    Copies would not overlap, and what is copied back last would be what the caller finds. Only x
    and out may overlap, because x is copied or read before anything is copied back to out.

    Args:
        given, name: As in on_host().
        view: Returns an array's view: view(array, name, writable=False).
        memory_of: Returns the memory of an array that is not C-contiguous, as memory() does; None
            if the call refuses it.

    Raises:
        InvalidArgument: They overlap, or it takes too long to find out.
    """
    import numpy as np

    out = given.get("out")
    written = ("residual", "x" if out is None else "out")
    for other in _ARRAYS:
        array = given.get(other)
        is_allowed = other == name or {name, other} == {"x", "out"}
        if array is None or is_allowed or not (name in written or other in written):
            continue
        try:
            seen = view(array, other, writable=False)
            theirs = memory(seen.address, (seen.nbytes,), (1,), 1)
        except NotContiguous:
            theirs = memory_of(array)
        mine = memory_of(given[name])
        if mine is None or theirs is None:
            continue
        # The type stubs of NumPy know the bounds 0 and -1 only.
        if np.may_share_memory(mine, theirs, max_work=_MOST_WORK):  # type: ignore[arg-type]
            raise InvalidArgument(
                f"{name} and {other} lie in the same memory, and the call writes one of them: they "
                "must not overlap"
            ) from None
