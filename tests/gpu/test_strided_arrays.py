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


class Tensor:
    def __init__(self, array, log):
        self.array, self.log, self.device = array, log, "cuda:0"
        self.shape = array.shape

    def stride(self):
        return tuple(each // self.array.itemsize for each in self.array.strides)

    def contiguous(self):
        self.log.append("copy")
        return Tensor(np.ascontiguousarray(self.array), self.log)

    def copy_(self, other):
        self.log.append("store")
        self.array[...] = other.array


class Ndarray:
    def __init__(self, array, log):
        self.array, self.log, self.device = array, log, nullcontext()
        self.shape, self.strides, self.itemsize = array.shape, array.strides, array.itemsize

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
    torch.cuda = SimpleNamespace(
        stream=on,
        default_stream=lambda device: f"default of {device}",
        ExternalStream=lambda handle, device: f"{handle} on {device}",
    )
    cupy.cuda = SimpleNamespace(ExternalStream=lambda handle: on(handle))

    def ascontiguousarray(array):
        found.append("copy")
        return Ndarray(np.ascontiguousarray(array.array), found)

    cupy.ascontiguousarray = ascontiguousarray
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return found


@pytest.mark.parametrize(
    ("kind", "stream", "begin"),
    [
        (Tensor, None, []),
        (Tensor, 7, ["7 on cuda:0"]),
        (Tensor, 0, ["default of cuda:0"]),
        (Tensor, LEGACY, ["default of cuda:0"]),
        (Ndarray, None, []),
        (Ndarray, 7, [7]),
    ],
)
def test_copies_are_made_on_the_calls_stream(log, kind, stream, begin):
    memory = np.arange(12).reshape(3, 4)
    array = kind(memory[:, 1:3], log)
    made = strided.copied(array, "x", is_written=True, stream=stream)
    end = ["end"] if begin else []
    assert log == [*begin, "copy", *end]
    assert made.array.array.flags.c_contiguous
    made.array.array[:] = -1
    made.store()
    assert log[len(begin) + len(end) + 1 :] == [*begin, "store", *end]
    assert memory.tolist() == [[0, -1, -1, 3], [4, -1, -1, 7], [8, -1, -1, 11]]


@pytest.mark.parametrize("kind", [Tensor, Ndarray])
def test_elements_that_share_memory_may_be_read_only(log, kind):
    array = kind(np.broadcast_to(np.float32(1), (2, 3)), log)
    assert strided.copied(array, "x", is_written=False, stream=None).array.array.sum() == 6
    with pytest.raises(kccl.InvalidArgument, match=r"x has strides .* may share memory"):
        strided.copied(array, "x", is_written=True, stream=None)


def test_arrays_of_other_libraries_are_not_copied():
    assert strided.copied(SimpleNamespace(), "x", is_written=False, stream=None) is None
