"""Arrays that offer DLPack's C exchange interface, as PyTorch's tensors do."""

import ctypes

import numpy as np

from kccl.base.dlpack import _Tensor as DLTensor

CPU, GPU = 1, 2
TensorFromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
CurrentStream = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
# The streams that the library uses now, by device; -1: it does not say.
STREAMS = {(GPU, 0): 7, (GPU, 1): 9}


class Exchange(ctypes.Structure):
    # DLPackExchangeAPI
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("tensor_from_object", TensorFromObject),
        ("current_stream", CurrentStream),
    )


@TensorFromObject
def tensor_from_object(array, filled):
    array.looks += 1
    if array.refuses:
        return -1
    tensor = filled.contents
    tensor.data = array.memory.ctypes.data
    tensor.device_type, tensor.device_id = array.device
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = array.memory.ndim, 2, 32, 1
    array.shape_words = (ctypes.c_int64 * array.memory.ndim)(*array.memory.shape)
    array.stride_words = (ctypes.c_int64 * array.memory.ndim)(
        *(stride // 4 for stride in array.memory.strides)
    )
    tensor.shape, tensor.strides, tensor.byte_offset = array.shape_words, array.stride_words, 0
    return 0


@CurrentStream
def current_stream(device_type, device_id, filled):
    stream = STREAMS[device_type, device_id]
    filled[0] = stream
    return min(stream, 0)


# A capsule points to its name.
NAME = b"dlpack_exchange_api"
EXCHANGE = Exchange(
    major=1, minor=3, tensor_from_object=tensor_from_object, current_stream=current_stream
)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Tensor:
    """A tensor of a library of which NumPy knows only DLPack. Counts who looked at it."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(EXCHANGE), NAME, None)
    dtype = np.dtype(np.float32)

    def __init__(self, memory, device=(CPU, 0)):
        self.memory, self.device = memory, device
        self.refuses = False
        self.looks = self.slow_looks = 0

    def __dlpack__(self, **options):
        self.slow_looks += 1
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


def ones():
    return Tensor(np.ones(6, np.float32))
