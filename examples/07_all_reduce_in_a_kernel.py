"""An all-reduce inside a kernel, between two parts of its computation.

Each rank has a target of its own. All ranks look for the x that is nearest to all targets. In each
step the kernel computes this rank's gradient, averages it over the ranks, and moves x. With
separate kernels each step would also cost launches. Here it only waits for the wire.

python examples/07_all_reduce_in_a_kernel.py

runs on the simulator, which also checks for data races. On two GPUs, with CuPy:
`python examples/07_all_reduce_in_a_kernel.py cuda`.
"""

import sys

import numpy as np

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

KCCL_KERNEL void descend(kccl::DeviceComm comm, float* x, float* gradient, const float* target,
                         uint64_t count, int64_t steps) {
    // Every block has a slice of x, and exchanges it with the same block of the other ranks.
    const kccl::Slice slice = kccl::block_slice<float>(count);
    const kccl::Block block = kccl::block();
    x += slice.begin, gradient += slice.begin, target += slice.begin;
    // Opened once. Then each call costs only the exchange.
    kccl::Channel<kccl::Block> channel(block, comm);

    for (int64_t step = 0; step < steps; ++step) {
        for (uint64_t i = block.index(); i < slice.count; i += block.size()) {
            gradient[i] = x[i] - target[i];
        }
        block.sync();  // any thread of the block may send what another one wrote
        const kccl::Status status =
            kccl::all_reduce<float, kccl::Avg>(channel, gradient, gradient, slice.count);
        if (status != kKcclOk) return;  // a peer is late or gone: comm.check() names it
        for (uint64_t i = block.index(); i < slice.count; i += block.size()) {
            x[i] -= 0.5f * gradient[i];
        }
    }
}
"""
COUNT, STEPS, BLOCKS, RANKS = 100, 20, 2, 2

backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
module = kccl.compile(SOURCE, ["descend"], target=backend)


def main(comm):
    xp = np
    if backend != "sim":
        import cupy as xp

        xp.cuda.Device(comm.rank).use()
    targets = np.random.default_rng(1).standard_normal((RANKS, COUNT)).astype(np.float32)
    x, gradient = xp.zeros(COUNT, xp.float32), xp.zeros(COUNT, xp.float32)
    # Copied before any kernel runs: CuPy's copy may wait for a peer's kernel, which waits for this
    # rank.
    target = xp.asarray(targets[comm.rank])
    # One channel for each block. `max_bytes` is the longest message of a block. Collective.
    device_comm = comm.device_comm(channels=BLOCKS, max_bytes=x.nbytes)
    descend = module.kernel("descend")
    descend(comm, device_comm, x, gradient, target, COUNT, STEPS, grid=BLOCKS, block=64)
    result = x if xp is np else x.get()  # waits for the kernel
    comm.check()  # raises if it failed
    np.testing.assert_allclose(result, targets.mean(axis=0), rtol=1e-4, atol=1e-5)
    return result


first, *others = kccl.run_threads(main, RANKS, backend=backend)
assert all(np.array_equal(first, other) for other in others)  # the same bits on every rank
print(f"{RANKS} ranks on {backend}: {STEPS} steps in one kernel, x is the mean of the targets")
