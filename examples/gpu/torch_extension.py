"""An all-reduce inside a kernel of a PyTorch C++ extension. The build only needs KCCL's headers.

A kernel takes the DeviceComm by value. Python passes it to the extension as bytes.

python examples/gpu/torch_extension.py
"""

import torch
from torch.utils.cpp_extension import load_inline

import kccl

DECLARATION = "void scaled_sum(const std::string& comm, torch::Tensor x, double factor);"
SOURCE = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <kccl/kccl.cuh>

__global__ void scaled_sum_kernel(kccl::DeviceComm comm, float* x, float factor, int64_t count) {
    const kccl::Slice slice = kccl::block_slice<float>(count);
    x += slice.begin;
    for (uint64_t i = threadIdx.x; i < slice.count; i += blockDim.x) x[i] *= factor;
    __syncthreads();
    kccl::all_reduce(kccl::block(), comm, x, x, slice.count);
}

// Runs on the current stream. Every block waits for its peers, so all blocks must run at the same
// time.
void scaled_sum(const std::string& bytes, torch::Tensor x, double factor) {
    kccl::DeviceComm comm;
    TORCH_CHECK(bytes.size() == sizeof(comm), "comm is ", bytes.size(), " bytes, must be ",
                sizeof(comm));
    std::memcpy(&comm, bytes.data(), sizeof(comm));
    TORCH_CHECK(comm.abi_version == kKcclAbiVersion, "comm is of another version of KCCL");
    TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.scalar_type() == torch::kFloat32);
    scaled_sum_kernel<<<comm.num_channels, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
        comm, x.data_ptr<float>(), static_cast<float>(factor), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""
COUNT, BLOCKS, RANKS = 1000, 4, 2


def build():
    return load_inline(
        "kccl_example",
        cpp_sources=[DECLARATION],
        cuda_sources=[SOURCE],
        functions=["scaled_sum"],
        extra_include_paths=[kccl.include_dir()],
        extra_cuda_cflags=["-std=c++20"],
    )


def main(comm):
    torch.cuda.set_device(comm.rank)
    device_comm = comm.device_comm(channels=BLOCKS, max_bytes=COUNT * 4)
    x = torch.full((COUNT,), comm.rank + 1.0, device="cuda")
    extension.scaled_sum(device_comm.data, x, 0.5)
    want = 0.5 * sum(range(1, comm.world_size + 1))
    assert (x == want).all(), x
    comm.check()
    print(f"rank {comm.rank} of {comm.world_size}: {COUNT} elements are {want}")


if __name__ == "__main__":
    extension = build()
    kccl.run_threads(main, RANKS, backend="cuda")
