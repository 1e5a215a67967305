"""Arrays that offer DLPack's C exchange interface, as PyTorch's tensors do."""

import ctypes
import gc
import sys

import numpy as np
import pytest

import kccl
from kccl.base.dlpack import _Tensor as DLTensor

CPU, GPU = 1, 2
TensorFromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class Exchange(ctypes.Structure):
    # DLPackExchangeAPI
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("tensor_from_object", TensorFromObject),
        ("current_stream", ctypes.c_void_p),
    )


@TensorFromObject
def tensor_from_object(array, filled):
    array.looks += 1
    if array.refuses:
        return -1
    tensor = filled.contents
    tensor.data = array.memory.ctypes.data
    tensor.device_type, tensor.device_id = array.device, 0
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = array.memory.ndim, 2, 32, 1
    array.shape_words = (ctypes.c_int64 * array.memory.ndim)(*array.memory.shape)
    array.stride_words = (ctypes.c_int64 * array.memory.ndim)(
        *(stride // 4 for stride in array.memory.strides)
    )
    tensor.shape, tensor.strides, tensor.byte_offset = array.shape_words, array.stride_words, 0
    return 0


# A capsule points to its name.
NAME = b"dlpack_exchange_api"
EXCHANGE = Exchange(major=1, minor=3, tensor_from_object=tensor_from_object)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Tensor:
    """A tensor of a library of which NumPy knows only DLPack. Counts who looked at it."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(EXCHANGE), NAME, None)
    dtype = np.dtype(np.float32)

    def __init__(self, memory):
        self.memory = memory
        self.device, self.refuses = CPU, False
        self.looks = self.slow_looks = 0

    def __dlpack__(self, **options):
        self.slow_looks += 1
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


def ones():
    return Tensor(np.ones(6, np.float32))


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_second_call_is_without_python(world_size):
    def main(comm):
        first, second, out = ones(), ones(), ones()
        assert comm.all_reduce(first) is first
        assert comm.all_reduce(second) is second
        assert comm.all_reduce(second, out=out) is out
        assert comm.all_reduce(second, out=out) is out
        assert second.slow_looks == out.slow_looks == 1
        return [array.memory.tolist() for array in (first, second, out)]

    want = [[world_size] * 6, [world_size] * 6, [world_size**2] * 6]
    assert kccl.run_threads(main, world_size) == [want] * world_size


def test_what_the_interface_refuses_goes_through_python():
    def main(comm):
        comm.all_reduce(ones())
        refused, elsewhere, recording = ones(), ones(), ones()
        refused.refuses = True
        elsewhere.device = GPU
        recording.requires_grad = True
        turned = Tensor(np.ones((2, 3), np.float32).T)
        for array in (refused, elsewhere, recording):
            comm.all_reduce(array)
            assert array.slow_looks == 1
        with pytest.raises(kccl.InvalidArgument, match="not C-contiguous"):
            comm.all_reduce(turned)

    kccl.run_threads(main, 1)


def test_a_buffer_of_the_same_type_and_size_is_another_call():
    """A read-only buffer must not be written because a tensor of its size may be."""

    def main(comm):
        comm.all_reduce(ones())
        x = np.ones(6, np.float32)
        x.flags.writeable = False
        with pytest.raises(kccl.InvalidArgument, match="read-only"):
            comm.all_reduce(x)

    kccl.run_threads(main, 1)


def test_nothing_is_kept():
    def main(comm):
        x = ones()
        comm.all_reduce(x)
        gc.collect()
        before = sys.getrefcount(x), sys.getrefcount(Tensor), sys.getrefcount(Tensor.dtype)
        for _ in range(100):
            comm.all_reduce(x)
        assert before == (
            sys.getrefcount(x),
            sys.getrefcount(Tensor),
            sys.getrefcount(Tensor.dtype),
        )

    kccl.run_threads(main, 1)


def test_a_positional_root_is_known_too():
    def main(comm):
        x, out = ones(), ones()
        for root in (0, 1, 0, 1):
            x.memory[:] = comm.rank + 1
            assert comm.broadcast(x, root) is x
            assert x.memory.tolist() == [root + 1] * 6
        assert x.slow_looks == 2
        with pytest.raises(TypeError, match="multiple values for argument 'root'"):
            comm.broadcast(x, 0, root=0)
        with pytest.raises(TypeError, match="positional"):
            comm.all_reduce(x, out)

    kccl.run_threads(main, 2)
