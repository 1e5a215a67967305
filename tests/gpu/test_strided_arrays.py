"""Copies of strided arrays on a GPU: which library makes them, and on which stream. No GPU is used:
the arrays are NumPy's, behind what PyTorch and CuPy have.
"""

import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import kccl
from kccl.gpu import strided

LEGACY = kccl.gpu.LEGACY_STREAM
OF_TORCH, OF_CUPY = 5, 6


class Tensor:
    """A tensor that requires grad, and no part of a graph."""

    is_cuda = True
    is_conj = is_neg = lambda self: False

    def __init__(self, array, log, has_graph=True):
        self.array, self.log, self.device = array, log, SimpleNamespace(index=0)
        self.shape, self.dtype = array.shape, array.dtype
        self.has_graph = has_graph

    def stride(self):
        return tuple(each // self.array.itemsize for each in self.array.strides)

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def numel(self):
        return self.array.size

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def detach(self):
        return Tensor(self.array, self.log, has_graph=False)

    def contiguous(self):
        assert not self.has_graph
        self.log.append("copy")
        return Tensor(np.ascontiguousarray(self.array), self.log)

    def copy_(self, other):
        assert sys.modules["torch"].mode == "inference"
        self.log.append("store")
        self.array[...] = other.array


class Ndarray:
    def __init__(self, array, log):
        self.array, self.log, self.device = array, log, nullcontext()
        self.shape, self.strides, self.itemsize = array.shape, array.strides, array.itemsize
        self.data = SimpleNamespace(ptr=array.ctypes.data)

    @property
    def __cuda_array_interface__(self):
        facts = {"shape": self.shape, "strides": self.strides, "data": (self.data.ptr, False)}
        return {**facts, "typestr": self.array.dtype.str}

    def __setitem__(self, key, other):
        self.log.append("store")
        self.array[key] = other.array


Ndarray.__module__ = "cupy"


@pytest.fixture
def log(monkeypatch):
    """What the libraries did, in order."""
    found = []

    @contextmanager
    def on(stream):
        found.append(stream)
        yield
        found.append("end")

    torch, cupy = ModuleType("torch"), ModuleType("cupy")

    @contextmanager
    def mode(name):
        torch.mode = name
        yield
        torch.mode = ""

    torch.no_grad, torch.inference_mode = (lambda: mode("no grad")), (lambda: mode("inference"))
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: OF_TORCH)
    torch.cuda = SimpleNamespace(
        stream=on,
        default_stream=lambda device: f"default of {device.index}",
        ExternalStream=lambda handle, device: f"{handle} on {device.index}",
    )
    cupy.cuda = SimpleNamespace(
        ExternalStream=lambda handle: on(handle),
        get_current_stream=lambda: SimpleNamespace(ptr=OF_CUPY),
    )

    def ascontiguousarray(array):
        found.append("copy")
        return Ndarray(np.ascontiguousarray(array.array), found)

    cupy.ascontiguousarray = ascontiguousarray
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return found


def strided_array(kind, log):
    memory = np.arange(12).reshape(3, 4)
    return kind(memory[:, 1:3], log), memory


@pytest.mark.parametrize(
    ("kind", "stream", "begin"),
    [
        (Tensor, None, []),
        (Tensor, 7, ["7 on 0"]),
        (Tensor, 0, ["default of 0"]),
        (Tensor, LEGACY, ["default of 0"]),
        (Ndarray, None, []),
        (Ndarray, 7, [7]),
    ],
)
def test_copies_are_made_on_the_calls_stream(log, kind, stream, begin):
    array, memory = strided_array(kind, log)
    made = strided.copied({"x": array, "stream": stream}, "x", is_written=True)
    check_stream(log, begin, made, memory)


@pytest.mark.parametrize(
    ("kind", "first", "begin"),
    [
        (Tensor, Ndarray, [f"{OF_CUPY} on 0"]),
        (Ndarray, Tensor, [OF_TORCH]),
        (Tensor, SimpleNamespace, ["default of 0"]),
        (Ndarray, SimpleNamespace, [LEGACY]),
    ],
)
def test_the_calls_stream_is_that_of_the_library_of_x(log, monkeypatch, kind, first, begin):
    """The array is of another one. So are those of KCCL: their stream is the legacy stream."""
    monkeypatch.setattr(kccl.gpu.driver, "legacy_stream", lambda: LEGACY)
    out, memory = strided_array(kind, log)
    x = SimpleNamespace() if first is SimpleNamespace else strided_array(first, log)[0]
    made = strided.copied({"x": x, "out": out}, "out", is_written=True)
    check_stream(log, begin, made, memory)


def check_stream(log, begin, made, memory):
    """The copy was made, and is stored, on the stream that `begin` tells."""
    end = ["end"] if begin else []
    assert log == [*begin, "copy", *end]
    assert made.array.array.flags.c_contiguous and made.is_written
    made.array.array[:] = -1
    made.store()
    assert log[len(begin) + len(end) + 1 :] == [*begin, "store", *end]
    assert memory.tolist() == [[0, -1, -1, 3], [4, -1, -1, 7], [8, -1, -1, 11]]


def test_without_x_the_stream_is_that_of_the_library_of_out(log):
    out, memory = strided_array(Tensor, log)
    made = strided.copied({"x": None, "out": out}, "out", is_written=True)
    check_stream(log, [], made, memory)


@pytest.mark.parametrize("kind", [Tensor, Ndarray])
def test_elements_that_share_memory_may_be_read_only(log, kind):
    array = kind(np.broadcast_to(np.float32(1), (2, 3)), log)
    assert strided.copied({"x": array}, "x", is_written=False).array.array.sum() == 6
    with pytest.raises(kccl.InvalidArgument, match=r"x has strides .* may share memory"):
        strided.copied({"x": array}, "x", is_written=True)


@pytest.mark.parametrize("kind", [Tensor, Ndarray])
def test_arrays_of_one_call_must_not_overlap(log, kind):
    memory = np.zeros((4, 8), np.float32)
    x, apart, shared = (kind(memory[:, i : i + 4], log) for i in (0, 4, 3))
    given = {"x": x, "residual": apart, "weight": None}
    assert strided.copied(given, "x", is_written=True) is not None
    with pytest.raises(kccl.InvalidArgument, match="x and residual lie in the same memory"):
        strided.copied({**given, "residual": shared}, "x", is_written=True)


def test_arrays_of_other_libraries_are_not_copied():
    assert strided.copied({"x": SimpleNamespace()}, "x", is_written=False) is None
