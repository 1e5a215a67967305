"""Arrays in GPU memory: callers' arrays, and the arrays that KCCL returns.

A caller's array is a PyTorch tensor, or has __cuda_array_interface__ (CuPy, Numba) or DLPack (JAX).
A call on it goes to the stream that its library uses at that moment, unless the caller gives one.
JAX does not tell its streams. A call on its arrays goes to the legacy default stream, or to the
stream that the caller gives, and that stream waits for JAX's pending work on the arrays.
"""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..base import dlpack, dtypes
from ..base.arrays import ArrayView, Pointer, offers_exchange
from ..base.copying import not_copied
from ..base.errors import BackendError, InvalidArgument, NotContiguous
from . import driver

# Libraries whose arrays are read-only. Neither their __cuda_array_interface__ nor DLPack before
# version 1 says so for all element types.
_IMMUTABLE = ("jax", "jaxlib")

_TYPESTR_KINDS = {"float": "f", "signed": "i", "unsigned": "u", "bool": "b", "complex": "c"}
_NAMES = {dtype.name for dtype in dtypes.ALL}
# NumPy's type strings without the byte order, as in "f4", for the types that NumPy has too.
_BY_TYPESTR = {
    f"{_TYPESTR_KINDS[dtype.kind]}{dtype.itemsize}": dtype.name
    for dtype in dtypes.ALL
    if dtype.name != "bfloat16" and not dtype.name.startswith("float8")
}


def library(array: Any) -> str:
    """Returns the name of the library of which an array is."""
    return type(array).__module__.partition(".")[0]


@dataclass(frozen=True)
class DeviceView(ArrayView):
    """A caller's memory on a GPU.

    Attributes:
        stream: Returns the stream that the array's library uses now.
        wait_on: Makes a stream wait for the library's pending work on the array. None if the caller
            must do that, as with PyTorch.
    """

    stream: Callable[[], int] = driver.legacy_stream
    wait_on: Callable[[int], object] | None = None


class DeviceArray:
    """An array in GPU memory; other libraries take it by __cuda_array_interface__ or DLPack.

    Attributes:
        address: The address of the first element.
        shape: Shape in elements.
        dtype: Element type.
        nbytes: Size in bytes.
        device: The device's number in this process.
    """

    __reduce_ex__ = not_copied(
        "the array is GPU memory of this process",
        "copy it with an array library first, as in torch.from_dlpack(x).cpu()",
    )

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: dtypes.Dtype, device: int, keep: Any
    ) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.device = device
        self._keep = keep

    def __repr__(self) -> str:
        return f"<kccl array {self.shape} of {self.dtype.name} on device {self.device}>"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "DeviceArray":
        """Returns rows [a, b) as an array in the same memory. Refuses steps other than 1."""
        if not isinstance(rows, slice):
            raise TypeError(f"index is {rows!r}, must be a slice")
        begin, end, step = rows.indices(len(self))
        if step != 1:
            raise InvalidArgument(f"the step of a slice is {step}, must be 1")
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(end - begin, 0), *self.shape[1:])
        address = self.address + begin * row_bytes
        return DeviceArray(address, shape, self.dtype, self.device, self)

    def reshape(self, *shape: int | Sequence[int]) -> "DeviceArray":
        """Returns the same elements, in the same memory, in another shape.

        The shape is given as integers or, as NumPy takes it too, as one sequence of integers. One
        length may be -1.
        """
        is_sequence = len(shape) == 1 and isinstance(shape[0], Sequence)
        given: Any = shape[0] if is_sequence else shape
        lengths = tuple(operator.index(each) for each in given)
        count, known = math.prod(self.shape), math.prod(each for each in lengths if each != -1)
        if -1 in lengths and known:
            lengths = tuple(count // known if each == -1 else each for each in lengths)
        if math.prod(lengths) != count or min(lengths, default=0) < 0:
            raise InvalidArgument(f"shape is {lengths}, must have {count} elements as {self.shape}")
        return DeviceArray(self.address, lengths, self.dtype, self.device, self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = _TYPESTR_KINDS[self.dtype.kind]
        if self.dtype.name not in _BY_TYPESTR.values():
            raise AttributeError(f"__cuda_array_interface__ has no {self.dtype.name}; use DLPack")
        return {
            "shape": self.shape,
            "typestr": f"{'<' if self.dtype.itemsize > 1 else '|'}{kind}{self.dtype.itemsize}",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return driver.table().dlpack_type, self.device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return dlpack.make(self.address, self.shape, self.dtype, self.__dlpack_device__(), self)


def view(array: Any, name: str, *, writable: bool, device: int | None) -> DeviceView:
    """Returns the view of a caller's array.

    Args:
        array: The array.
        name: What the caller calls it, for error messages.
        writable: Whether it will be written.
        device: Number of the device on which the array must be; None: any.

    Raises:
        InvalidArgument: `array` is no array on that device, not contiguous, or read-only.
    """
    on: int | None
    if isinstance(array, DeviceArray):
        found, on = _view_of_own(array), array.device
    elif _is_of_torch(array):
        found, on = _view_of_torch(array, name, writable)
    elif library(array) in _IMMUTABLE:
        if writable:
            raise InvalidArgument(
                f"{name} is read-only, as arrays of JAX are, must be writable: give `out`"
            )
        found, on = _view_by_dlpack(array, name, driver.legacy_stream(), writable)
        wait_on = partial(_wait_for, array, name)
        found = replace(found, wait_on=wait_on)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _view_by_interface(array, name, writable)
        on = device if device is None or found.count == 0 else _device_of(found.address, name)
    elif hasattr(array, "__dlpack__"):
        found, on = _view_by_dlpack(array, name, -1, writable)
    else:
        raise InvalidArgument(
            f"{name} is a {type(array).__name__}, must be an array in GPU memory: something with "
            "__cuda_array_interface__ or DLPack"
        )
    if device is not None and on != device:
        raise InvalidArgument(
            f"{name} is on device {on}, must be on the communicator's, device {device}"
        )
    return found


def like(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns a new array of the library, element type and device of `array`.

    Raises:
        InvalidArgument: The library is neither PyTorch nor CuPy.
    """
    if hasattr(array, "new_empty"):
        return array.new_empty(shape)
    if library(array) == "cupy":
        with array.device:
            return sys.modules["cupy"].empty(shape, array.dtype)
    raise InvalidArgument(
        f"out is None and x is a {type(array).__name__} of {library(array)}: out must be given "
        "where x is not an array of PyTorch or CuPy"
    )


def pointer(array: Any, name: str) -> Pointer:
    """Returns the pointer to an array for a kernel, with the stream that its library uses now.

    The kernel may write the array. The array may have any element type and be on any device.

    Raises:
        InvalidArgument: `array` is no array in GPU memory, not contiguous, or read-only.
    """
    if _is_of_torch(array):
        _check_of_torch(array, name, writable=True)
        return Pointer(array.data_ptr(), array, _stream_of_torch(int(array.device.index)))
    if hasattr(array, "__cuda_array_interface__") and library(array) not in _IMMUTABLE:
        facts = array.__cuda_array_interface__
        _check_interface(facts, int(facts["typestr"][2:]), name, writable=True)
        stream = _stream_of_library(array, facts.get("stream"))
        return Pointer(int(facts["data"][0] or 0), array, stream)
    found = view(array, name, writable=True, device=None)
    return Pointer(found.address, found, found.stream)


def stream_of(stream: Any) -> int:
    """Returns a caller's `stream` as the driver's handle: an integer, or something with
    __cuda_stream__.

    Raises:
        InvalidArgument: `stream` is neither.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    # Streams of PyTorch before 2.9 have this attribute instead.
    handle = getattr(stream, "cuda_stream", None)
    if handle is None:
        raise InvalidArgument(
            f"stream is {stream!r}, must be None, an integer, or something with __cuda_stream__"
        )
    return int(handle)


def current_stream(array: Any) -> int:
    """Returns the stream of a call whose first array this is, and whose caller gives none."""
    if _is_of_torch(array):
        return _stream_of_torch(int(array.device.index))()
    facts = {} if library(array) in _IMMUTABLE else getattr(array, "__cuda_array_interface__", {})
    return _stream_of_library(array, facts.get("stream"))()


def stream_of_call(given: Any, view: ArrayView | None, others: Sequence[ArrayView]) -> int:
    """Returns the stream of a call, and makes it wait for pending work on the arrays.

    Args:
        given: The stream that the caller gave; None for the current one of the library of `view`.
        view: The first array's view, which must be a DeviceView if `given` is None.
        others: The other inputs' views.

    Raises:
        InvalidArgument: `given` is no stream.
    """
    late: Sequence[ArrayView | None]
    if given is None:
        assert isinstance(view, DeviceView)
        # view() has made this stream wait for the first array's work already.
        stream, late = view.stream(), others
    else:
        stream, late = stream_of(given), (view, *others)
    for each in late:
        if isinstance(each, DeviceView) and each.wait_on is not None:
            each.wait_on(stream)
    return stream


def _view_of_own(array: DeviceArray) -> DeviceView:
    count = math.prod(array.shape)
    return DeviceView(array.address, count, array.dtype, False, array)


def _is_of_torch(array: Any) -> bool:
    return hasattr(array, "data_ptr") and hasattr(array, "is_cuda")


def _dtype_of_torch(dtype: Any) -> dtypes.Dtype:
    name = str(dtype).removeprefix("torch.")
    if name in _NAMES:
        return dtypes.of(name)
    return dtypes.of_bytes(name, dtype.itemsize)


def _check_of_torch(array: Any, name: str, *, writable: bool) -> None:
    if not array.is_cuda:
        raise InvalidArgument(
            f"{name} is a tensor on {array.device}, must be in GPU memory: this communicator's "
            f"backend is {driver.table().backend}"
        )
    if not array.is_contiguous():
        raise NotContiguous(name, tuple(array.shape), is_written=writable)
    dlpack.check_plain(array, name)


def _view_of_torch(array: Any, name: str, writable: bool) -> tuple[DeviceView, int]:
    _check_of_torch(array, name, writable=writable)
    on = int(array.device.index)
    kind = type(array)
    is_direct = offers_exchange(kind)
    return (
        DeviceView(
            array.data_ptr(),
            array.numel(),
            _dtype_of_torch(array.dtype),
            is_direct,
            array,
            exchange_type=kind if is_direct else None,
            exchange_device=(driver.table().dlpack_type, on),
            stream=_stream_of_torch(on),
        ),
        on,
    )


def _stream_of_torch(device: int) -> Callable[[], int]:
    torch = sys.modules["torch"]
    # torch.cuda.current_stream() calls this function, which returns the handle, not an object.
    ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    current_stream = ask or (lambda index: torch.cuda.current_stream(index).cuda_stream)
    # The result is called before each run of a prepared call. A partial adds no Python frame.
    return partial(current_stream, device)


def _check_interface(facts: Any, itemsize: int, name: str, *, writable: bool) -> None:
    shape, strides = tuple(facts["shape"]), facts.get("strides")
    if writable and facts["data"][1]:
        raise InvalidArgument(f"{name} is read-only, must be writable")
    if strides is not None and not dlpack.is_contiguous(shape, tuple(strides), itemsize):
        raise NotContiguous(name, shape, is_written=writable)


def _view_by_interface(array: Any, name: str, writable: bool) -> DeviceView:
    facts = array.__cuda_array_interface__
    dtype = _dtype(getattr(array, "dtype", facts["typestr"]), name)
    _check_interface(facts, dtype.itemsize, name, writable=writable)
    stream = _stream_of_library(array, facts.get("stream"))
    address, count = int(facts["data"][0] or 0), math.prod(facts["shape"])
    return DeviceView(address, count, dtype, False, array, stream=stream)


def _stream_of_library(array: Any, now: int | None) -> Callable[[], int]:
    """Returns a function that gives the current stream of an array's library. The function must not
    keep the array alive.
    """
    if library(array) == "cupy":
        current_stream = sys.modules["cupy"].cuda.get_current_stream
        return lambda: int(current_stream().ptr)
    return lambda: now or driver.legacy_stream()


def _view_by_dlpack(array: Any, name: str, stream: int, writable: bool) -> tuple[DeviceView, int]:
    gpus = driver.table().dlpack_type
    found = dlpack.read(array, name, gpus, stream=stream)
    if found.device_type != gpus:
        raise InvalidArgument(
            f"{name} is a {type(array).__name__} in other memory, must be in GPU memory: this "
            f"communicator's backend is {driver.table().backend}"
        )
    if not found.is_contiguous:
        raise NotContiguous(name, found.shape, is_written=writable)
    count = math.prod(found.shape)
    return DeviceView(
        found.address, count, found.dtype, False, (array, found.keep)
    ), found.device_id


def _wait_for(array: Any, name: str, stream: int) -> None:
    """Lets the array's library make a stream wait for its pending work on the array."""
    gpu = driver.table()
    # DLPack refuses stream 0 as ambiguous. For the driver 0 means the legacy stream, so its other
    # handle is passed.
    dlpack.read(array, name, gpu.dlpack_type, stream=stream or gpu.legacy_stream)


def _dtype(dtype: Any, name: str) -> dtypes.Dtype:
    try:
        if isinstance(dtype, str) and dtype[:1] in "<>|":
            dtype = _dtype_of_typestr(dtype)
        return dtypes.moved(dtype)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _dtype_of_typestr(typestr: str) -> Any:
    import numpy as np

    try:
        return np.dtype(typestr)
    except TypeError as error:
        raise InvalidArgument(f"typestr is {typestr!r}, must be one of NumPy's: {error}") from None


def _device_of(address: int, name: str) -> int:
    try:
        return driver.table().device_of(address)
    except BackendError as error:
        raise InvalidArgument(f"{name} is not in a GPU's memory: {error}") from error
