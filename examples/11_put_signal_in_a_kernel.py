"""put, signal and wait inside a kernel: each rank gives its edges to its two neighbours.

Heat spreads along a ring of rods, one on each rank. In each step every point becomes the mean of
itself and its neighbours. The points at the ends need the ends of the neighbours' rods. So the
kernel puts its ends into the neighbours' windows, signals, and waits for both neighbours' signals.

The edges of a step lie in one half of the window, those of the next step in the other half. A
neighbour that has signalled step s + 1 has read the edges of step s. So two halves are enough, and
no acknowledgement is needed.

python examples/11_put_signal_in_a_kernel.py

runs on the simulator, which also checks for data races. On four GPUs, with CuPy:
`python examples/11_put_signal_in_a_kernel.py cuda`.
"""

import sys

import numpy as np

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

// `edges` has two halves, for even and odd steps: {from the left, from the right}.
KCCL_KERNEL void spread(kccl::DeviceComm comm, kccl::Window edges, float* rod, float* next,
                        uint64_t count, int64_t steps) {
    const kccl::Block block = kccl::block();
    const int left = (comm.rank + comm.world_size - 1) % comm.world_size;
    const int right = (comm.rank + 1) % comm.world_size;

    for (int64_t step = 0; step < steps; ++step) {
        const uint64_t half = step % 2 * 2 * sizeof(float);
        // My first point lies to the right of the left neighbour's rod, my last one to the left of
        // the right neighbour's. put() checks that they lie in the window.
        kccl::put(block, comm, edges, left, half + sizeof(float), rod, sizeof(float));
        kccl::put(block, comm, edges, right, half, rod + count - 1, sizeof(float));
        kccl::signal(block, comm, left, /*signal_id=*/0);
        kccl::signal(block, comm, right, /*signal_id=*/1);
        // A signal orders the puts before it: after the wait the block may read what they wrote.
        if (kccl::wait(block, comm, right, /*signal_id=*/0, 1) != kKcclOk) return;
        if (kccl::wait(block, comm, left, /*signal_id=*/1, 1) != kKcclOk) return;

        const float* edge = edges.local<float>(half);
        for (uint64_t i = block.index(); i < count; i += block.size()) {
            const float before = i == 0 ? edge[0] : rod[i - 1];
            const float after = i == count - 1 ? edge[1] : rod[i + 1];
            next[i] = (before + rod[i] + after) / 3;
        }
        block.sync();  // all threads have read the rod, and the edges
        float* old = rod;
        rod = next;
        next = old;
    }
}
"""
COUNT, STEPS, RANKS = 100, 20, 4

backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
module = kccl.compile(SOURCE, ["spread"], target=backend)
heat = np.random.default_rng(1).random(RANKS * COUNT, np.float32)


def main(comm):
    xp = np
    if backend != "sim":
        import cupy as xp

        xp.cuda.Device(comm.rank).use()
    rod = xp.array(heat[comm.rank * COUNT :][:COUNT])
    spare = xp.zeros_like(rod)
    # Collective: every rank has this memory, and every rank's kernel can write it.
    edges = comm.window(2 * 2 * 4)
    device_comm = comm.device_comm(channels=1, max_bytes=4)
    module.kernel("spread")(comm, device_comm, edges, rod, spare, COUNT, STEPS, block=64)
    result = rod if xp is np else rod.get()  # waits for the kernel
    comm.check()  # raises if it failed
    edges.close()  # collective: no rank's kernel uses it any more
    return result  # STEPS is even, so the last result is in the first array


rods = np.concatenate(kccl.run_threads(main, RANKS, backend=backend))
for _ in range(STEPS):
    heat = (np.roll(heat, 1) + heat + np.roll(heat, -1)) / 3
np.testing.assert_allclose(rods, heat, rtol=1e-5)
print(f"{RANKS} ranks on {backend}: {STEPS} steps of put, signal and wait in one kernel")
