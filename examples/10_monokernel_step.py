"""All layers of a decoder in one kernel, over all blocks of all GPUs.

    y = W x, and the next layer's x is y

Every block computes some rows of y and publishes them. Then it collects the rows of all blocks into
its shared memory, where the next layer reads them. Each packet carries its own flag, so no barrier
is needed. A block waits only for packets, and starts the next layer when it has them.

python examples/10_monokernel_step.py

runs on the simulator; on one GPU or two, with CuPy: `python examples/10_monokernel_step.py cuda`.
"""

import sys

import numpy as np

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

namespace platform = kccl::platform;
constexpr kccl::mem::Order kRelaxed = kccl::mem::Order::kRelaxed;

// weights: this rank's rows, [layer][block][row of the block][width]; x and out: width.
KCCL_KERNEL void decode(kccl::DeviceComm comm, float* out, const float* weights, const float* x,
                        uint32_t width, uint32_t layers) {
    const kccl::Block block = kccl::block();
    const uint32_t lane = block.index() % platform::kWarpSize;
    const uint32_t warps = block.size() / platform::kWarpSize;
    // Opened once. To exchange between the blocks of one GPU only, take kKcclReachRank.
    kccl::GridExchange<kKcclReachAllRanks> exchange(comm);
    const uint32_t each = width / exchange.num_slices();
    float* y = reinterpret_cast<float*>(platform::dynamic_shared());
    float* slice = y + width;

    for (uint32_t layer = 0; layer < layers; ++layer) {
        const uint64_t part = uint64_t{layer} * platform::blocks_per_grid();
        const float* rows = weights + (part + platform::block_in_grid()) * each * width;
        // Each warp computes a row.
        for (uint32_t i = block.index() / platform::kWarpSize; i < each; i += warps) {
            float sum = 0;
            for (uint32_t k = lane; k < width; k += platform::kWarpSize) {
                sum += rows[uint64_t{i} * width + k] * x[k];
            }
            for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
                sum += platform::shuffle(sum, lane ^ step);
            }
            if (lane == 0) slice[i] = sum;
        }
        block.sync();  // now all warps have stored their rows, and none of them still reads y
        // Relaxed: the other blocks need to see the slices only, and no other stores.
        kccl::publish<kRelaxed>(exchange, slice, each);
        if (kccl::collect<kRelaxed>(exchange, y, each) != kKcclOk) return;
        x = y;
    }
    if (platform::block_in_grid() != 0) return;
    for (uint32_t i = block.index(); i < width; i += block.size()) out[i] = x[i];
}
"""
WIDTH, LAYERS, BLOCKS = 48, 5, 3

backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
ranks = min(kccl.gpu.num_devices(), 2) if backend != "sim" else 2
module = kccl.compile(SOURCE, ["decode"], target=backend)


def main(comm):
    xp = np
    if backend != "sim":
        import cupy as xp

        xp.cuda.Device(comm.rank).use()
    random = np.random.default_rng(1)
    w = random.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    x = random.standard_normal(WIDTH).astype(np.float32)
    mine = np.split(w, comm.world_size, axis=1)[comm.rank]  # its rows of each layer

    y = xp.zeros(WIDTH, xp.float32)
    arrays = (y, xp.asarray(np.ascontiguousarray(mine)), xp.asarray(x))
    each = WIDTH // (comm.world_size * BLOCKS)
    module.kernel("decode")(
        *(comm, comm.device_comm(channels=1), *arrays, np.uint32(WIDTH), np.uint32(LAYERS)),
        grid=BLOCKS,
        block=64,
        shared_bytes=(WIDTH + each) * y.itemsize,
    )
    result = y if xp is np else y.get()  # waits for the kernel
    comm.check()  # raises if it failed
    want = x.astype(np.float64)
    for layer in w:
        want = layer @ want
    np.testing.assert_allclose(result, want, rtol=1e-3, atol=1e-4)
    return result


first, *others = kccl.run_threads(main, ranks, backend=backend)
assert all(np.array_equal(first, other) for other in others)  # the same bits on every rank
print(f"{ranks} ranks on {backend}: {LAYERS} layers in one kernel, as NumPy has them")
