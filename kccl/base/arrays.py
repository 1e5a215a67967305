"""Finds the address, size and element type of a caller's array in host memory. Copies nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import dtypes
from .abi import ffi
from .errors import InvalidArgument, NotContiguous

if TYPE_CHECKING:
    from . import dlpack

_BYTES = ffi.typeof("char[]")
_EXCHANGE = "__dlpack_c_exchange_api__"


@dataclass(frozen=True)
class ArrayView:
    """A caller's memory.

    Attributes:
        address: Address of the first element.
        count: Number of elements.
        dtype: Element type.
        is_direct: True if the dispatcher (csrc/host/dispatcher.cpp) can take such an array without
            Python: it has a `dtype`, and the buffer protocol or DLPack's C interface.
        exchange_type: The array's type, if it gives its memory by DLPack; None for buffers.
        exchange_device: The device of the memory: DLPack's device type and device number.
        keep: An object that keeps the memory alive.
    """

    address: int
    count: int
    dtype: dtypes.Dtype
    is_direct: bool
    keep: Any
    exchange_type: type | None = None
    exchange_device: tuple[int, int] = (1, 0)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Pointer:
    """A kernel's argument that is an array of any element type.

    Attributes:
        address: Address of the first element.
        keep: An object that keeps the memory alive.
        stream: Returns the stream that the array's library uses now; None if there are no streams.
        nbytes: Size of the memory; 0 if it is not known.
    """

    address: int
    keep: Any
    stream: Callable[[], int] | None = None
    nbytes: int = 0


def view(array: Any, name: str, *, writable: bool) -> ArrayView:
    """Returns the view of a caller's array, by the buffer protocol or else by DLPack.

    Args:
        array: The array.
        name: Name of the argument, for error messages.
        writable: True if the call writes the array.

    Raises:
        InvalidArgument: `array` is not an array in host memory, not C-contiguous, masked, read-only
            although the call writes it, or its elements are Python objects.
    """
    _check_unmasked(array, name)
    try:
        dtype = dtypes.moved(array.dtype)
        buffer = ffi.from_buffer(_BYTES, array, require_writable=writable)
    except (AttributeError, BufferError, TypeError, ValueError):
        return _view_of_others(array, name, writable)
    return ArrayView(_address(buffer), len(buffer) // dtype.itemsize, dtype, True, buffer)


def offers_exchange(kind: type) -> bool:
    """Tells whether arrays of this type give C their memory by DLPack's C interface."""
    return hasattr(kind, _EXCHANGE)


def pointer(array: Any, name: str) -> Pointer:
    """Returns the pointer to a writable array, of any element type.

    Raises:
        InvalidArgument: `array` is not an array in host memory, not C-contiguous, masked, or
            read-only.
    """
    _check_unmasked(array, name)
    try:
        buffer = ffi.from_buffer(_BYTES, array, require_writable=True)
    except (BufferError, TypeError, ValueError):
        source, memory, _ = _source(array, name, writable=True)
        buffer = _buffer_of(source, memory, name, writable=True)
    return Pointer(_address(buffer), buffer, nbytes=len(buffer))


def _check_unmasked(array: Any, name: str) -> None:
    # Masked arrays are refused, because their buffer has the masked elements too, but not the mask.
    # arguments.cpp has the same rule.
    kind = type(array)
    if hasattr(kind, "mask") and hasattr(kind, "filled"):
        raise InvalidArgument(
            f"{name} is a {kind.__name__}, must be an array without a mask: a call would use the "
            f"masked elements too. Pass {name}.filled(value), or {name}.data to use them on purpose"
        )


def _address(buffer: Any) -> int:
    return int(ffi.cast("uintptr_t", buffer))


def _view_of_others(array: Any, name: str, writable: bool) -> ArrayView:
    """Does what view() does, for everything but plain NumPy arrays. Raises InvalidArgument if the
    array cannot be used.
    """
    source, memory, is_buffer = _source(array, name, writable=writable)
    dtype = _dtype_of(source, memory, name)
    buffer = _buffer_of(source, memory, name, writable)
    count = len(buffer) // dtype.itemsize
    if not is_buffer:
        kind = type(array)
        is_direct = offers_exchange(kind) and hasattr(array, "dtype")
        return ArrayView(_address(buffer), count, dtype, is_direct, buffer, kind)
    return ArrayView(_address(buffer), count, dtype, memory is None, buffer)


def _source(array: Any, name: str, *, writable: bool) -> tuple[Any, memoryview | None, bool]:
    """Finds the object that gives the memory of an array that is no plain NumPy array.

    Returns:
        Three values. The first is that object: the array itself, or a NumPy array over the memory
        that the array gives by DLPack. The second is a memoryview of an array that has no dtype,
        from which the element type comes; else None. The third is True if the first is the array.
    """
    if hasattr(array, "__cuda_array_interface__"):
        raise InvalidArgument(
            f"{name} is a {type(array).__name__} in GPU memory, must be in host memory: "
            "this communicator's backend is host or sim"
        )
    try:
        memory = memoryview(array) if not hasattr(array, "dtype") else None
    except TypeError:
        return _from_dlpack(array, name, writable), None, False
    if memory is None and not has_buffer(array):
        return _from_dlpack(array, name, writable), None, False
    return array, memory, True


def _buffer_of(array: Any, memory: memoryview | None, name: str, writable: bool) -> Any:
    """Returns a buffer over the memory. `array` and `memory` are what _source() returned."""
    is_readonly = writable and _is_readonly(array, memory)
    if not _is_contiguous(array, memory) and not is_readonly:
        raise NotContiguous(name, _shape_of(array, memory), is_written=writable)
    try:
        return ffi.from_buffer(_BYTES, array, require_writable=writable)
    except (BufferError, ValueError, TypeError) as error:
        if is_readonly:
            raise InvalidArgument(f"{name} is read-only, must be writable") from None
        raise InvalidArgument(f"{name} does not give its memory: {error}") from error


def has_buffer(array: Any) -> bool:
    """Tells whether an array has the buffer protocol, even if it refuses its memory."""
    try:
        ffi.from_buffer(_BYTES, array)
    except TypeError:
        return False
    except (BufferError, ValueError):
        return True
    return True


def _from_dlpack(array: Any, name: str, writable: bool) -> Any:
    if not hasattr(array, "__dlpack__"):
        raise InvalidArgument(
            f"{name} is a {type(array).__name__}, must be an array: something with the buffer "
            "protocol or DLPack"
        )
    import numpy as np

    from . import dlpack

    dlpack.check_plain(array, name)
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if array.__dlpack_device__()[0] != dlpack.CPU:
            raise dlpack.refused(name, error) from error
    # NumPy refuses types that it lacks, as bfloat16, so the array is read without NumPy.
    return _to_numpy(dlpack.read_on_host(array, name), name, writable)


def _to_numpy(found: "dlpack.Found", name: str, writable: bool) -> Any:
    """Returns a NumPy array over memory that DLPack describes."""
    import ctypes

    import numpy as np

    if not found.is_contiguous:
        if writable and found.is_readonly:
            raise InvalidArgument(f"{name} is read-only, must be writable")
        raise NotContiguous(name, found.shape, is_written=writable)
    dtype = dtypes.to_numpy(found.dtype)
    if 0 in found.shape:
        array = np.empty(found.shape, dtype)
    else:
        nbytes = math.prod(found.shape) * found.dtype.itemsize
        memory = (ctypes.c_char * nbytes).from_address(found.address)
        # The NumPy array keeps `memory` alive, and `memory` keeps the library's memory alive.
        memory.keep = found.keep  # type: ignore[attr-defined]
        array = np.frombuffer(memoryview(memory), dtype).reshape(found.shape)
    array.flags.writeable = not found.is_readonly
    return array


def _dtype_of(array: Any, memory: memoryview | None, name: str) -> dtypes.Dtype:
    try:
        if memory is not None:
            return dtypes.of_format(memory.format, memory.itemsize)
        return dtypes.moved(array.dtype)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _is_contiguous(array: Any, memory: memoryview | None) -> bool:
    if memory is not None:
        return memory.c_contiguous
    return bool(array.flags.c_contiguous) if hasattr(array, "flags") else True


def _is_readonly(array: Any, memory: memoryview | None) -> bool:
    if memory is not None:
        return memory.readonly
    return not array.flags.writeable if hasattr(array, "flags") else False


def _shape_of(array: Any, memory: memoryview | None) -> Any:
    return memory.shape if memory is not None else getattr(array, "shape", None)


def shape(array: Any, view: ArrayView) -> tuple[int, ...]:
    """Returns the shape of `array`. If the array has DLPack but no shape, returns that of a vector
    with the elements of `view`, which is the array's view.
    """
    found = getattr(array, "shape", None)
    if found is None and not hasattr(array, "__dlpack__"):
        found = memoryview(array).shape
    return (view.count,) if found is None else tuple(found)


def shape_of_chunk(array: Any, view: ArrayView, world_size: int) -> tuple[int, ...]:
    """Returns the shape of one of world_size equal parts of an array; see shape().

    If world_size divides the first dimension, the part keeps the others. Otherwise it has one
    dimension.
    """
    whole = shape(array, view)
    is_split = bool(whole) and whole[0] % world_size == 0
    return (whole[0] // world_size, *whole[1:]) if is_split else (view.count // world_size,)


def check_result(x: ArrayView, out: ArrayView, count: int, own_offset: int) -> None:
    """Checks that `out` can take the result of a collective over `x`.

    Args:
        x, out: The arrays.
        count: Number of elements of the result.
        own_offset: Offset in bytes of this rank's chunk in the larger of the two arrays.

    Raises:
        InvalidArgument: The types differ, the size is wrong, or the arrays overlap and the call is
            not in place: the smaller array is not this rank's chunk of the larger one.
    """
    if out.dtype != x.dtype:
        raise InvalidArgument(
            f"out has dtype {out.dtype.name}, x has {x.dtype.name}: must be equal"
        )
    if out.count != count:
        wanted = "must be equal" if count == x.count else f"out must have {count}"
        raise InvalidArgument(f"out has {out.count} elements, x has {x.count}: {wanted}")
    is_apart = x.address + x.nbytes <= out.address or out.address + out.nbytes <= x.address
    larger, smaller = (out, x) if x.nbytes < out.nbytes else (x, out)
    if not is_apart and smaller.address != larger.address + own_offset:
        if x.count == out.count:
            wanted = "out must be the memory of x"
        else:
            chunk = ("out", "x") if smaller is out else ("x", "out")
            wanted = f"{chunk[0]} must be this rank's chunk of {chunk[1]}"
        raise InvalidArgument(
            f"out begins at {out.address:#x} and x at {x.address:#x}: they overlap; {wanted}, or "
            "the two must not overlap"
        )
