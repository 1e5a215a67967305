"""A matrix times a vector, with the columns split over the ranks, and an all-reduce of the result.

    y = sum over ranks of W[:, mine] x[mine]

A decoder does this twice in each layer for one token. Every block computes some rows of y, and
sends them at once, while other blocks still compute. So no rank waits for the end of a kernel.

python examples/09_fused_gemv.py

runs on the simulator; on two GPUs, with CuPy: `python examples/09_fused_gemv.py cuda`.
"""

import sys

import numpy as np

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

namespace platform = kccl::platform;

// y: `rows` elements. w: this rank's columns, rows x width, row-major. x: this rank's part, `width`
// elements.
KCCL_KERNEL void gemv(kccl::DeviceComm comm, float* y, const float* w, const float* x,
                      uint64_t rows, uint64_t width) {
    const kccl::Block block = kccl::block();
    const kccl::Slice slice = kccl::block_slice<float>(rows);
    const uint32_t lane = block.index() % platform::kWarpSize;
    const uint32_t warps = block.size() / platform::kWarpSize;
    kccl::Channel<kccl::Block> channel(block, comm);

    // Each warp computes a row.
    for (uint64_t i = block.index() / platform::kWarpSize; i < slice.count; i += warps) {
        const float* row = w + (slice.begin + i) * width;
        float sum = 0;
        for (uint64_t k = lane; k < width; k += platform::kWarpSize) sum += row[k] * x[k];
        for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
            sum += platform::shuffle(sum, lane ^ step);
        }
        if (lane == 0) y[slice.begin + i] = sum;
    }
    block.sync();  // now all warps have stored their rows
    kccl::all_reduce(channel, y + slice.begin, y + slice.begin, slice.count);
}
"""
ROWS, WIDTH, BLOCKS, RANKS = 50, 72, 3, 2

backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
module = kccl.compile(SOURCE, ["gemv"], target=backend)


def main(comm):
    xp = np
    if backend != "sim":
        import cupy as xp

        xp.cuda.Device(comm.rank).use()
    random = np.random.default_rng(1)
    w = random.standard_normal((ROWS, RANKS * WIDTH)).astype(np.float32)
    x = random.standard_normal(RANKS * WIDTH).astype(np.float32)
    mine = slice(comm.rank * WIDTH, (comm.rank + 1) * WIDTH)

    y = xp.zeros(ROWS, xp.float32)
    parts = (xp.asarray(np.ascontiguousarray(w[:, mine])), xp.asarray(x[mine]))
    device_comm = comm.device_comm(channels=BLOCKS, max_bytes=ROWS * 4)
    module.kernel("gemv")(comm, device_comm, y, *parts, ROWS, WIDTH, grid=BLOCKS, block=64)
    result = y if xp is np else y.get()
    comm.check()
    np.testing.assert_allclose(result, w @ x, rtol=1e-4, atol=1e-4)
    return result


first, *others = kccl.run_threads(main, RANKS, backend=backend)
assert all(np.array_equal(first, other) for other in others)  # the same bits on every rank
print(f"{RANKS} ranks on {backend}: y = W x of {ROWS} rows, as NumPy has it")
