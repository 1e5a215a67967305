"""Arrays of PyTorch and CuPy for AMD's GPUs: they have the interfaces of those for NVIDIA's."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hip_arrays import from_gpu, to_gpu

import kccl
from kccl.gpu import arrays, driver

KDLROCM = 10


class Foreign:
    """An array of a library that has DLPack only."""

    def __init__(self, array):
        self.array = array
        self.streams = []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **keywords):
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **keywords)


class Ndarray:
    """As CuPy's."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype.name

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


Ndarray.__module__ = "cupy"


class Tensor:
    """As PyTorch's: its ROCm builds say cuda, too."""

    is_cuda = True
    dtype = "torch.float32"
    requires_grad = False

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.device = SimpleNamespace(index=array.device)

    def is_contiguous(self):
        return True

    def is_conj(self):
        return False

    def is_neg(self):
        return False

    def data_ptr(self):
        return self.array.address

    def numel(self):
        return int(np.prod(self.shape))


@pytest.fixture
def libraries(monkeypatch):
    """Libraries whose current stream is one of the driver's."""
    with driver.device(0).current():
        stream = driver.make_stream()
    torch, cupy = ModuleType("torch"), ModuleType("cupy")
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: stream)
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=stream))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return stream


@pytest.mark.parametrize("kind", [Foreign, Ndarray, Tensor])
def test_calls_take_arrays_of_other_libraries(amd, libraries, kind):
    def main(comm):
        x = to_gpu(np.arange(8, dtype=np.float32), 0)
        comm.all_reduce(kind(x))
        driver.synchronize(driver.device(0))
        comm.check()
        return from_gpu(x).tolist()

    assert kccl.run_threads(main, 1, backend="hip") == [list(range(8))]


def test_dlpack_has_amds_number_and_default_stream(amd):
    x = to_gpu(np.ones(4, np.float32), 1)
    assert x.__dlpack_device__() == (KDLROCM, 1)
    foreign = Foreign(x)
    found = arrays.view(foreign, "x", writable=True, device=1)
    assert (found.address, found.stream()) == (x.address, 0)
    # -1: the caller sees to it.
    assert foreign.streams == [-1]
    with pytest.raises(kccl.InvalidArgument, match=r"in other memory, .* backend is hip"):
        arrays.view(Foreign(np.ones(4)), "x", writable=True, device=1)


def test_the_device_of_an_interfaces_address_is_asked_of_the_driver(amd, libraries):
    x = Ndarray(to_gpu(np.ones(4, np.float32), 2))
    assert arrays.view(x, "x", writable=True, device=2).count == 4
    with pytest.raises(kccl.InvalidArgument, match=r"x is on device 2, must be on .* device 1"):
        arrays.view(x, "x", writable=True, device=1)
    host = np.ones(4, np.float32)
    x.array = SimpleNamespace(
        __cuda_array_interface__={
            "shape": (4,), "typestr": "<f4", "data": (host.ctypes.data, False), "strides": None
        }
    )  # fmt: skip
    with pytest.raises(kccl.InvalidArgument, match="not in a GPU's memory: hipPointerGetAttr"):
        arrays.view(x, "x", writable=True, device=1)


@pytest.mark.long
def test_groups_of_pytorch_drive_amds_gpus(amd):
    torch = pytest.importorskip("torch")
    communicators = pytest.importorskip("kccl.interop.torch_communicators")
    backends = [communicators.backend_for(torch.device(each)) for each in ("cpu", "cuda")]
    assert backends == ["host", "hip"]
