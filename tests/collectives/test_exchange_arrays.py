"""Arrays that offer DLPack's C exchange interface, as PyTorch's tensors do."""

import gc
import sys

import numpy as np
import pytest
from exchange_arrays import GPU, Tensor, ones

import kccl


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
        elsewhere.device = GPU, 0
        recording.requires_grad = True
        turned = Tensor(np.ones((2, 3), np.float32).T)
        for array in (refused, elsewhere, recording):
            comm.all_reduce(array)
            assert array.slow_looks == 1
        with pytest.raises(kccl.InvalidArgument, match="not C-contiguous"):
            comm.all_reduce.prepare(turned)
        assert comm.all_reduce(turned) is turned

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
