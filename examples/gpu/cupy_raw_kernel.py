"""An all-reduce inside a RawKernel of CuPy. CuPy compiles and launches; KCCL is only a header.

A kernel takes the DeviceComm by value. CuPy passes a NumPy array of one element by value. Here the
element is the whole struct, so the program need not know the struct's fields.

kccl run -n 2 -- python examples/gpu/cupy_raw_kernel.py
"""

import cupy
import numpy as np

import kccl

SOURCE = r"""
#include <kccl/kccl.cuh>

extern "C" __global__ void scaled_sum(kccl::DeviceComm comm, float* x, float factor, long count) {
    const kccl::Slice slice = kccl::block_slice<float>(count);
    x += slice.begin;
    for (long i = threadIdx.x; i < slice.count; i += blockDim.x) x[i] *= factor;
    __syncthreads();
    kccl::all_reduce(kccl::block(), comm, x, x, slice.count);
}
"""
COUNT, BLOCKS = 1000, 4
OPTIONS = ("-std=c++20", f"-I{kccl.include_dir()}")

if __name__ == "__main__":
    comm = kccl.init(backend=kccl.gpu.backend())
    cupy.cuda.Device(comm.local_rank).use()
    kernel = cupy.RawKernel(SOURCE, "scaled_sum", options=OPTIONS)
    data = comm.device_comm(channels=BLOCKS, max_bytes=COUNT * 4).data
    device_comm = np.frombuffer(data, f"V{len(data)}").copy()

    x = cupy.full(COUNT, comm.rank + 1, np.float32)
    # Every block waits for its peers, so all blocks must run at the same time.
    kernel((BLOCKS,), (128,), (device_comm, x, np.float32(0.5), COUNT))
    want = 0.5 * sum(range(1, comm.world_size + 1))
    assert (x == want).all(), x
    comm.check()
    print(f"rank {comm.rank} of {comm.world_size}: {COUNT} elements are {want}")
    comm.close()
