"""C makes known calls on arrays in GPU memory. C functions replace those of the driver."""

import numpy as np
import pytest
from exchange_arrays import CPU, GPU, STREAMS, Tensor
from stream_world import World

import kccl
from kccl.base.abi import fastcall, ffi


class Calls:
    """A dispatcher that knows one call, on arrays of 24 bytes on GPU 0."""

    def __init__(self, world):
        self.driver = world.driver
        self.slow_calls = []
        self.dispatcher = fastcall.Dispatcher(self._slow, ("op", ""), False)
        self._handle = world.handle()
        self.op = ffi.cast("KcclGpuOp *", self._handle)
        self.op.queue.array_type = id(Tensor)
        for out_bytes in (0, 24):
            self.dispatcher.learn(
                *(Tensor.dtype, Tensor, (GPU, 0), 24, (..., ...), out_bytes, 0, True, False),
                *(int(ffi.cast("uintptr_t", self._handle)), self._handle, world.raise_failure),
            )

    def _slow(self, *arrays, **options):
        self.slow_calls.append((arrays, options))
        return "slow"

    def __call__(self, *arrays, **options):
        return self.dispatcher(*arrays, **options)


@pytest.fixture
def calls():
    return Calls(World())


def on_gpu(ordinal=0):
    return Tensor(np.ones(6, np.float32), (GPU, ordinal))


def test_they_follow_the_librarys_stream(calls, monkeypatch):
    x, out = on_gpu(), on_gpu()
    assert calls(x) is x
    assert calls.op.op.call.input == calls.op.op.call.output == x.memory.ctypes.data
    monkeypatch.setitem(STREAMS, (GPU, 0), 0)
    assert calls(x, out=out) is out
    assert calls.op.op.call.output == out.memory.ctypes.data
    assert calls.driver.streams == [7, 0] and not calls.slow_calls


@pytest.mark.parametrize(
    "x",
    [on_gpu(1), Tensor(np.ones(6, np.float32), (CPU, 0)), np.ones(6, np.float32)],
    ids=["another GPU", "host", "a buffer"],
)
def test_python_sees_arrays_elsewhere(calls, x):
    assert calls(x) == calls(on_gpu(), out=x) == "slow"
    assert not calls.driver.streams


def test_python_sees_the_first_array_after_those_of_another_library(calls):
    """barrier() follows the stream of the library whose array was used last."""
    calls.op.queue.array_type = id(np.ndarray)
    assert calls(on_gpu()) == "slow"


def test_python_asks_for_the_stream_if_c_cannot(calls, monkeypatch):
    monkeypatch.setitem(STREAMS, (GPU, 0), -1)
    assert calls(on_gpu()) == "slow"


def test_a_launch_that_is_refused_is_an_error(calls):
    calls.driver.error = 719
    with pytest.raises(kccl.BackendError, match="error 719"):
        calls(on_gpu())
