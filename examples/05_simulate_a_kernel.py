"""Runs your own kernel on the simulator, which finds a bug that a GPU shows only now and then.

Each rank writes values into its right neighbour's window, and then sets a flag there. The neighbour
waits for the flag and reads the values. At first the flag is stored relaxed. So the flag may be
visible before the values. With a release store the same kernel passes under every seed. No GPU is
needed: the simulator runs every GPU thread on the CPU, and delays stores as a GPU may.

python examples/05_simulate_a_kernel.py
"""

import numpy as np

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;

// `to_right`, `flag_of_right`: in the right neighbour's window. `from_left`, `flag`: in ours.
template <Order order>
KCCL_KERNEL void exchange(float* to_right, uint32_t* flag_of_right, const float* from_left,
                          const uint32_t* flag, const float* values, float* halo, uint64_t count) {
    const kccl::Block block = kccl::block();
    for (uint64_t i = block.index(); i < count; i += block.size()) to_right[i] = values[i];
    block.sync();
    if (kccl::leads(block)) kccl::mem::store<order, Scope::kSystem>(flag_of_right, 1u);

    // All threads of a warp poll together, and leave together.
    while (kccl::platform::warp_any(kccl::mem::load<Order::kAcquire, Scope::kSystem>(flag) == 0)) {
        kccl::mem::poll_pause();
    }
    for (uint64_t i = block.index(); i < count; i += block.size()) halo[i] = from_left[i];
}
"""
COUNT = 100
FLAG = 512  # offset of the flag in the window, in a cache line of its own
WRONG, RIGHT = "exchange<Order::kRelaxed>", "exchange<Order::kRelease>"

module = kccl.compile(SOURCE, [WRONG, RIGHT], target="sim")


def exchange(comm, kernel):
    window = comm.window(FLAG + 4)
    left, right = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
    mine, theirs = window.addresses[comm.rank], window.addresses[right]
    values = np.arange(COUNT, dtype=np.float32) + 1000 * comm.rank
    halo = np.zeros_like(values)
    module.kernel(kernel)(comm, theirs, theirs + FLAG, mine, mine + FLAG, values, halo, COUNT)
    assert (halo == np.arange(COUNT) + 1000 * left).all()


try:
    kccl.run_threads(lambda comm: exchange(comm, WRONG), 3, backend="sim", seed=1)
except kccl.ProtocolError as error:
    print(error, end="\n\n")
else:
    raise AssertionError("the simulator overlooked the relaxed store")

for seed in range(20):
    kccl.run_threads(lambda comm: exchange(comm, RIGHT), 3, backend="sim", seed=seed)
print("with release the kernel is right under 20 seeds")
