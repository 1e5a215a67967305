"""A user's kernel runs on the stream that its first array's library uses now. The arrays, and the
communicator, are fakes; no GPU is needed.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import kccl
from kccl.base import arrays
from kccl.gpu.arrays import DeviceArray
from kccl.module import Module


class Tensor:
    """As PyTorch's, of a type that KCCL's collectives do not have."""

    is_cuda = True
    device = SimpleNamespace(index=3)
    dtype = "torch.uint8"

    def data_ptr(self):
        return 0x3000

    def is_contiguous(self):
        return True


class Ndarray:
    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (4,),
        "typestr": "|u1",
        "data": (0x4000, False),
        "strides": None,
        "stream": None,
    }


Ndarray.__module__ = "cupy"


class Numbas(Ndarray):
    """As Numba's, which says its stream in the interface."""

    __cuda_array_interface__ = {**Ndarray.__cuda_array_interface__, "stream": 66}  # noqa: RUF012


Numbas.__module__ = "numba.cuda"


@pytest.fixture
def launches(monkeypatch):
    """Calls a fake kernel with arrays and a stream; returns the stream that the context gets."""
    now = {"torch": 70, "cupy": 80}
    torch, cupy = ModuleType("torch"), ModuleType("cupy")
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: now["torch"] + device)
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=now["cupy"]))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    found = []
    launch = lambda kernel, data, *, stream, **shape: found.append(stream)  # noqa: E731
    backend = SimpleNamespace(load=lambda kernel: None)
    context = SimpleNamespace(launch=launch, backend=backend)
    comm = SimpleNamespace(backend="cuda", context=context)

    def call(*args, stream=None):
        entry = SimpleNamespace(parameters=[(8, 8)] * len(args), kinds="?" * len(args))
        kernel = Module("cuda", 32, ["k"], lambda: [entry]).kernel("k")
        kernel(comm, *args, stream=stream)
        return found.pop()

    call.now = now
    return call


def test_the_current_stream_of_the_first_arrays_library(launches):
    assert launches(5, Tensor(), Ndarray()) == 73
    assert launches(Ndarray(), Tensor()) == 80
    assert launches(Numbas()) == 66
    launches.now["torch"] = 0
    assert launches(Tensor()) == 3
    assert launches(DeviceArray(0x1000, (2,), kccl.float32, 0, None)) == kccl.gpu.LEGACY_STREAM


def test_a_given_stream_wins(launches):
    assert launches(Tensor(), stream=0) == 0
    assert launches(Tensor(), stream=5) == 5


def test_without_arrays_the_backend_chooses(launches):
    assert launches(5, 2.0) is None


class Foreign:
    """An array of a library whose arrays have no buffer, as PyTorch's tensors on the host."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)


def test_pointers_on_the_host_take_any_element_type():
    for dtype in (np.int8, np.uint16, np.complex64, np.float32):
        x = np.zeros(4, dtype)
        for each in (x, Foreign(x), memoryview(x)):
            found = arrays.pointer(each, "x")
            assert (found.address, found.stream) == (x.ctypes.data, None)
    with pytest.raises(kccl.InvalidArgument, match="x is read-only"):
        arrays.pointer(memoryview(np.zeros(4, np.int8)).toreadonly(), "x")
    with pytest.raises(kccl.InvalidArgument, match="not C-contiguous"):
        arrays.pointer(np.zeros((4, 4), np.int8)[:, 1:], "x")
