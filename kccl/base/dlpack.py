"""Reads and makes DLPack capsules, by which array libraries exchange device memory."""

import ctypes
from dataclasses import dataclass
from typing import Any

from . import dtypes
from .errors import InvalidArgument

CPU = 1  # kDLCPU; the vendors' tables have the numbers of GPUs
_NAME = b"dltensor"
_VERSIONED_NAME = b"dltensor_versioned"
_VERSION = (1, 0)  # the version of DLPack that read_on_host() asks for
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
# Dtype.kind -> DLPack's type code. Some floats have codes of their own, in _FLOAT_CODES.
_CODES = {"signed": 0, "unsigned": 1, "float": 2, "complex": 5, "bool": 6}
_HANDLES = 3  # kDLOpaqueHandle
_FLOAT_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}


class _Tensor(ctypes.Structure):
    # The layout of DLPack's DLTensor.
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    # The layout of DLPack's DLManagedTensor.
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    # The layout of DLPack's DLManagedTensorVersioned.
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", _api)
)
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
# PyCapsule_IsValid and PyCapsule_GetPointer, declared to take the capsule's address: when a
# destructor runs, its capsule has no references left and cannot be passed as a Python object.
_is_unused = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

# Address of a _Managed -> the objects that its capsule points to, until the consumer deletes it.
_alive: dict[int, Any] = {}


def _delete(address: int) -> None:
    _alive.pop(address, None)


def _destroy(capsule: int) -> None:
    if _is_unused(capsule, _NAME):
        _delete(_pointer_of(capsule, _NAME))


_delete_in_c, _destroy_in_c = _Deleter(_delete), _Destructor(_destroy)


@dataclass(frozen=True)
class Found:
    """What a capsule describes.

    Attributes:
        address: Address of the first element.
        shape: Shape in elements.
        dtype: Element type.
        device_type, device_id: The device, by DLPack's numbers.
        is_contiguous: True if the array is C-contiguous.
        keep: The capsule, which keeps the memory alive.
        is_readonly: True if the library says that the array is read-only. read() does not ask it,
            and leaves this False.
    """

    address: int
    shape: tuple[int, ...]
    dtype: dtypes.Dtype
    device_type: int
    device_id: int
    is_contiguous: bool
    keep: Any
    is_readonly: bool = False


def make(
    address: int,
    shape: tuple[int, ...],
    dtype: dtypes.Dtype,
    device: tuple[int, int],
    owner: Any,
) -> Any:
    """Returns a capsule for memory of a GPU. It keeps `owner` alive until its consumer is done.

    Args:
        address, shape, dtype: See Found.
        device: DLPack's type and number of the GPU.
        owner: The object that owns the memory.
    """
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    tensor = _Tensor(address, *device, len(shape), *_type_of(dtype), sizes, None, 0)
    managed = _Managed(tensor, None, _delete_in_c)
    at = ctypes.addressof(managed)
    _alive[at] = managed, sizes, owner
    return _new(at, _NAME, _destroy_in_c)


def read(array: Any, name: str, gpus: int, *, stream: int = -1) -> Found:
    """Returns what an array's __dlpack__ describes.

    Args:
        array: The array.
        name: Name of the argument, for error messages.
        gpus: DLPack's device type of this process's GPUs.
        stream: If the array is on these GPUs, its library makes this stream wait for its own
            pending work; -1 for no wait.

    Raises:
        InvalidArgument: The array gives no capsule, or its elements are handles or not whole bytes.
    """
    check_plain(array, name)
    try:
        device_type, _ = array.__dlpack_device__()
        capsule = array.__dlpack__(stream=stream) if device_type == gpus else array.__dlpack__()
        address = _pointer_in(capsule, _NAME)
    except _REFUSALS as error:
        raise refused(name, error) from error
    return _found(_Managed.from_address(address).tensor, capsule, name)


def read_on_host(array: Any, name: str) -> Found:
    """Does what read() does, for an array in host memory whose library tells whether it is
    read-only.
    """
    check_plain(array, name)
    try:
        capsule = array.__dlpack__(max_version=_VERSION)
        address = _pointer_in(capsule, _VERSIONED_NAME)
    except _REFUSALS as error:
        raise refused(name, error) from error
    managed = _Versioned.from_address(address)
    return _found(managed.tensor, capsule, name, bool(managed.flags & _READ_ONLY))


_REFUSALS = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)


def refused(name: str, error: Exception) -> InvalidArgument:
    """Returns the error for an array that gives no capsule."""
    return InvalidArgument(f"{name} does not give its memory by DLPack: {error}")


def check_plain(array: Any, name: str) -> None:
    """Raises InvalidArgument for PyTorch's lazy negation or conjugate, whose memory has other
    values.
    """
    for method, what in (("is_neg", "negates"), ("is_conj", "conjugates")):
        is_changed = getattr(array, method, None)
        if callable(is_changed) and is_changed():
            raise InvalidArgument(
                f"{name} is a view that {what} the memory behind it, must be a tensor with its own "
                f"values: {name}.resolve_{method.removeprefix('is_')}() makes one"
            )


def _found(tensor: _Tensor, capsule: Any, name: str, is_readonly: bool = False) -> Found:
    shape = tuple(tensor.shape[: tensor.ndim])
    return Found(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        _dtype_of(tensor, name),
        tensor.device_type,
        tensor.device_id,
        not tensor.strides or is_contiguous(shape, tuple(tensor.strides[: tensor.ndim])),
        capsule,
        is_readonly,
    )


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1) -> bool:
    """Tells whether an array with these strides is C-contiguous. `unit` is the stride between two
    neighbouring elements: 1 if strides count elements, or the element's size if they count bytes.
    """
    wanted = unit
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != wanted:
            return False
        wanted *= size
    return True


def _type_of(dtype: dtypes.Dtype) -> tuple[int, int, int]:
    """Returns DLPack's code, bits and lanes of an element type."""
    return _FLOAT_CODES.get(dtype.name, _CODES[dtype.kind]), 8 * dtype.itemsize, 1


def _dtype_of(tensor: _Tensor, name: str) -> dtypes.Dtype:
    for dtype in dtypes.ALL:
        if (tensor.code, tensor.bits, tensor.lanes) == _type_of(dtype):
            return dtype
    bits = tensor.bits * tensor.lanes
    if tensor.code == _HANDLES:
        raise InvalidArgument(
            f"{name} has DLPack type code {tensor.code}, an opaque handle, must be of a type of "
            "plain bytes: a handle means nothing to other ranks"
        )
    if bits % 8 or not bits:
        raise InvalidArgument(
            f"{name} has DLPack type code {tensor.code} of {bits} bits, must have whole bytes"
        )
    return dtypes.of_bytes(f"DLPack type code {tensor.code} of {bits} bits", bits // 8)
