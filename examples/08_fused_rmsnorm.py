"""All-reduce, residual and RMSNorm in one kernel, as they follow a layer that is split over ranks.

    hidden = residual + sum over ranks of partial        out = hidden / rms(hidden) * weight

Each block reduces a row over the ranks, and continues with it: one launch, one trip to memory.

python examples/08_fused_rmsnorm.py

runs on the simulator; on two GPUs, with CuPy: `python examples/08_fused_rmsnorm.py cuda`.
"""

import sys

import numpy as np

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

namespace platform = kccl::platform;

// The sum of every thread's value, in every thread of the block; at most 32 warps.
KCCL_DEVICE float block_sum(kccl::Block block, float value) {
    struct Sums { float of_warp[32]; };
    KCCL_BLOCK_SHARED(Sums, sums);
    const uint32_t lane = block.index() % platform::kWarpSize;
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2)
        value += platform::shuffle(value, lane ^ step);
    if (lane == 0) sums.of_warp[block.index() / platform::kWarpSize] = value;
    block.sync();
    value = 0;
    for (uint32_t i = 0; i < block.size() / platform::kWarpSize; ++i) value += sums.of_warp[i];
    block.sync();  // before the next sum writes
    return value;
}

KCCL_KERNEL void add_and_normalise(kccl::DeviceComm comm, float* out, float* residual,
                                   float* partial, const float* weight, uint64_t width,
                                   uint64_t rows, float epsilon) {
    const kccl::Block block = kccl::block();
    kccl::Channel<kccl::Block> channel(block, comm);
    for (uint64_t row = platform::block_in_grid(); row < rows; row += platform::blocks_per_grid()) {
        float* hidden = residual + row * width;
        float* mine = partial + row * width;
        if (kccl::all_reduce(channel, mine, mine, width) != kKcclOk) return;
        float squares = 0;
        for (uint64_t i = block.index(); i < width; i += block.size()) {
            hidden[i] += mine[i];
            squares += hidden[i] * hidden[i];
        }
        const float mean = block_sum(block, squares) / static_cast<float>(width);
        const float scale = 1 / platform::square_root(mean + epsilon);
        for (uint64_t i = block.index(); i < width; i += block.size())
            out[row * width + i] = hidden[i] * scale * weight[i];
    }
}
"""
ROWS, WIDTH, EPSILON, BLOCKS, RANKS = 3, 96, 1e-6, 2, 2

backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
module = kccl.compile(SOURCE, ["add_and_normalise"], target=backend)


def main(comm):
    xp = np
    if backend != "sim":
        import cupy as xp

        xp.cuda.Device(comm.rank).use()
    random = np.random.default_rng(1)
    partials = random.standard_normal((RANKS, ROWS, WIDTH)).astype(np.float32)
    residual = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    weight = random.standard_normal(WIDTH).astype(np.float32)
    hidden = residual + partials.sum(axis=0)
    want = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + EPSILON) * weight

    out, kept = xp.zeros((ROWS, WIDTH), xp.float32), xp.asarray(residual)
    arrays = (out, kept, xp.asarray(partials[comm.rank]), xp.asarray(weight))
    device_comm = comm.device_comm(channels=BLOCKS, max_bytes=WIDTH * 4)
    kernel = module.kernel("add_and_normalise")
    kernel(comm, device_comm, *arrays, WIDTH, ROWS, np.float32(EPSILON), grid=BLOCKS, block=64)
    out, kept = (out, kept) if xp is np else (out.get(), kept.get())
    comm.check()
    np.testing.assert_allclose(kept, hidden, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


kccl.run_threads(main, RANKS, backend=backend)
print(f"{RANKS} ranks on {backend}: {ROWS} rows of {WIDTH}, as NumPy has them")
