"""kccl.compile() for GPUs: a user's kernels, alone and with their peers."""

import ctypes
import time

import numpy as np
import pytest
from gpu_vendor import BACKEND, WARP_SIZE

import kccl
from kccl import gpu

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SOURCE = r"""
#include <kccl/kccl.cuh>

template <class T>
__global__ void scale(T* x, T factor, long n) {
    for (long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        x[i] *= factor;
    }
}

struct Pair { char tag; double value; };
__global__ void mixed(double* out, char a, Pair pair, short b, float c, bool d) {
    out[0] = a; out[1] = pair.tag; out[2] = pair.value; out[3] = b; out[4] = c; out[5] = d;
}

__global__ void fill_shared(int* out, int n) {
    extern __shared__ int memory[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) memory[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = memory[n - 1 - i];
}

// Every block reduces its own slice on a channel of its own, again and again.
__global__ void reduce_slices(kccl::DeviceComm comm, float* x, long each, int rounds) {
    float* slice = x + blockIdx.x * each;
    for (int i = 0; i < rounds; ++i) {
        const kccl::Status status =
            kccl::all_reduce<float, kccl::Avg>(kccl::block(), comm, slice, slice, each);
        if (status != kKcclOk) return;
    }
}

// The blocks take turns in writing, so each sees all that the ones before it wrote.
__global__ void relay(kccl::DeviceComm comm, int* x, int* status) {
    for (int turn = 0; turn < gridDim.x; ++turn) {
        if (turn == blockIdx.x && threadIdx.x == 0) {
            int sum = 1;
            for (int k = 0; k < turn; ++k) sum += x[k];
            x[turn] = sum % 65521;
        }
        const kccl::Status synced = kccl::grid_sync(comm);
        if (synced != kKcclOk) *status = synced;
    }
}
"""
NAMES = ["scale<float>", "scale<double>", "mixed", "fill_shared", "reduce_slices", "relay"]


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES, target=BACKEND)


def test_arguments_are_packed_and_checked(module):
    def main(comm):
        x = torch.arange(1000, dtype=torch.float32, device="cuda")
        module.kernel("scale<float>")(comm, x, np.float32(3), 1000, grid=4, block=128)
        assert torch.equal(x.cpu(), torch.arange(1000, dtype=torch.float32) * 3)

        class Pair(ctypes.Structure):
            _fields_ = (("tag", ctypes.c_char), ("value", ctypes.c_double))

        out = torch.zeros(6, dtype=torch.float64, device="cuda")
        mixed = module.kernel("mixed")
        values = np.int8(7), Pair(b"\x05", 2.5), np.int16(-9), np.float32(0.5), True
        mixed(comm, out, *values, block=WARP_SIZE)
        assert out.tolist() == [7, 5, 2.5, -9, 0.5, 1]
        with pytest.raises(kccl.InvalidArgument, match="takes 6 arguments, got 5"):
            mixed(comm, out, *values[:-1], block=WARP_SIZE)
        # A number becomes what the parameter is, if it fits.
        mixed(comm, out, -2, *values[1:-2], 0.25, True, block=WARP_SIZE)
        assert out.tolist() == [-2, 5, 2.5, -9, 0.25, 1]
        for wrong, words in (
            (300, "argument 1 is 300, must fit 8 bits: -128 to 255"),
            (np.int16(300), "argument 1 is 300, must fit 8 bits: -128 to 255"),
            (ctypes.c_int16(3), "argument 1 of mixed is a c_short of 2 bytes, .* parameter has 1"),
        ):
            with pytest.raises(kccl.InvalidArgument, match=words):
                mixed(comm, out, wrong, *values[1:], block=WARP_SIZE)
        with pytest.raises(kccl.InvalidArgument, match="GPU memory"):
            mixed(comm, np.zeros(6), *values, block=WARP_SIZE)
        with pytest.raises(kccl.InvalidArgument, match="multiple of the warp size"):
            mixed(comm, out, *values, block=WARP_SIZE + 1)

    kccl.run_threads(main, 1, backend=BACKEND)


def test_dynamic_shared_memory(module):
    def main(comm):
        # On NVIDIA's GPUs more than a kernel gets unasked.
        count = gpu.device(0).shared_bytes // 4
        out = torch.zeros(count, dtype=torch.int32, device="cuda")
        kernel = module.kernel("fill_shared")
        kernel(comm, out, np.int32(count), block=256, shared_bytes=4 * count)
        want = torch.arange(count, dtype=torch.int32).flip(0)
        assert torch.equal(out.cpu(), want)
        too_much = f"shared_bytes is {2**20}, must be at most {4 * count}: a block"
        with pytest.raises(kccl.InvalidArgument, match=too_much):
            kernel(comm, out, np.int32(count), block=256, shared_bytes=2**20)
        # A launch with less leaves what the one before was allowed.
        for nbytes in (4 * 64, 4 * count):
            kernel(comm, out, np.int32(nbytes // 4), block=256, shared_bytes=nbytes)
        assert torch.equal(out.cpu(), want)

    kccl.run_threads(main, 1, backend=BACKEND)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives_within_a_kernel(world_size, module):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        blocks, each = 132, 700
        device_comm = comm.device_comm(channels=blocks, max_bytes=4 * each)
        x = torch.full((blocks * each,), float(comm.rank), device="cuda")
        kernel = module.kernel("reduce_slices")
        for _ in range(3):
            x.fill_(comm.rank)
            kernel(comm, device_comm, x, each, np.int32(100), grid=blocks, block=128)
            assert (x == (world_size - 1) / 2).all()
        comm.check()

    kccl.run_threads(main, world_size, backend=BACKEND)


def test_blocks_of_one_gpu_synchronise(module):
    def main(comm):
        blocks = gpu.device(0).multiprocessors
        x = torch.zeros(blocks, dtype=torch.int32, device="cuda")
        status = torch.zeros(1, dtype=torch.int32, device="cuda")
        kernel = module.kernel("relay")
        device_comm = comm.device_comm(channels=1, max_bytes=1)
        for count in (blocks, 7, blocks):
            x.zero_()
            kernel(comm, device_comm, x, status, grid=count, block=64)
            want = []
            for _ in range(count):
                want.append((1 + sum(want)) % 65521)
            assert status.item() == 0
            assert x[:count].tolist() == want
        with pytest.raises(kccl.InvalidArgument, match="so its blocks may wait for each other"):
            kernel(comm, device_comm, x, status, grid=100 * blocks, block=1024)
        comm.check()

    kccl.run_threads(main, 1, backend=BACKEND)


def test_a_late_peer_fails_a_persistent_kernel(module):
    def main(comm):
        torch.cuda.set_device(comm.rank % torch.cuda.device_count())
        comm.timeout = 0.3
        x = torch.zeros(700, device="cuda")
        kernel = module.kernel("reduce_slices")
        device_comm = comm.device_comm(channels=1, max_bytes=2800)
        if comm.rank == 0:
            kernel(comm, device_comm, x, 700, np.int32(10**6), block=128)
            torch.cuda.synchronize()
            with pytest.raises(kccl.Timeout, match="peer 1 did not arrive"):
                comm.check()
        else:
            time.sleep(1.5)

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    kccl.run_threads(main, 2, backend=BACKEND)
