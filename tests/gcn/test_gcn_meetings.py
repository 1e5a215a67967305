"""Warps that meet, and one of them that fences for all: mem::finish_stores()."""

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_machine import Launch, Program
from gcn_world import World, compiled

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
# A seed of 75 finds it.
SEEDS = range(256)
WAVES, THREADS = 4, 256
# Block 0 stores rows, its waves meet, and its first wave says so to block 1, which has another die.
# The rows are known to be global memory. Stores to what may be LDS count for waits of LDS as well.
SOURCE = """#include <kccl/kccl.cuh>
#include <kccl/meeting.cuh>
KCCL_KERNEL void tell(uint32_t* rows, uint32_t* flag, uint32_t* seen) {
    using namespace kccl;
    constexpr mem::Scope kReach = mem::Scope::kDevice;
    auto& place = *reinterpret_cast<MeetingPlace*>(platform::dynamic_shared());
    if (leads(block())) init_meeting(place, WAVES);
    block().sync();
    const uint32_t i = platform::thread_in_block();
    if (platform::block_in_grid() == 0) {
        mem::store_plain(rows + i, i + 1);
        FINISH
        Meeting<WAVES> meeting(place);
        meeting.meet(false);
        if (!leads(block())) return;
        mem::fence<mem::Order::kAcqRel, kReach>();
        mem::store<mem::Order::kRelaxed, kReach>(flag, 1u);
        return;
    }
    while (mem::load<mem::Order::kRelaxed, kReach>(flag) == 0) {}
    mem::fence<mem::Order::kAcqRel, kReach>();
    mem::store_plain(seen + i, mem::load_plain(rows + i));
}
"""


def _sees_all(program: Program, seed: int) -> bool:
    """Whether block 1 has seen all rows of block 0."""
    world = World(1)
    rows, flag, seen = (world.array(0, np.zeros(THREADS, np.uint32)) for _ in range(3))
    addresses = np.array([each.ctypes.data for each in (rows, flag, seen)], np.uint64)
    launch = Launch(
        0,
        program,
        program.symbol("_Z4tell"),
        addresses.tobytes(),
        grid=2,
        block=THREADS,
        shared_bytes=1024,
    )
    report = world.run([launch], seed=seed)
    assert report.finding is None, report.finding
    return bool((seen == np.arange(1, THREADS + 1)).all())


@pytest.mark.parametrize("finishes", [True, False])
def test_a_fence_behind_a_meeting_orders_what_all_waves_have_finished(finishes):
    """Without finish_stores(), a fence waits for the stores of its own wave alone."""
    source = SOURCE.replace("WAVES", str(WAVES))
    source = source.replace("FINISH", "mem::finish_stores();" if finishes else "")
    program = Program(compiled(source))
    assert all(_sees_all(program, seed) for seed in SEEDS) is finishes
