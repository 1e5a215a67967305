"""What clang makes of the library for gfx942 runs, with caches that are not coherent: bit for bit
the results that NumPy has in rank order. No AMD GPU took part.
"""

import re

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_machine import ASSUMED, LATENCIES, Launch, Program, Unknown
from gcn_programs import RESULTS, collective
from gcn_world import CHAIN, Sizes, World, compiled

import kccl

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
# Seed 0 takes the times of the table. The others delay, reorder and tear accesses.
SEEDS = range(5)


# test_gcn_mutations.py has each protocol on two ranks.
@pytest.mark.parametrize("kernel", RESULTS)
def test_results_are_those_in_rank_order(kernel):
    for seed in SEEDS:
        # 1000 elements: slices of several waves, whose last one is not full.
        outcome = collective(kernel, 4, seed=seed)
        assert outcome.wrong is None, f"seed {seed}: {outcome.wrong}"


@pytest.mark.parametrize("count", [1, 3, 64])
def test_short_and_odd_lengths(count):
    for seed in SEEDS:
        outcome = collective(
            "all_reduce_one_shot_ll16", 2, count=count, grid=1, block=64, seed=seed
        )
        assert outcome.wrong is None, f"seed {seed}: {outcome.wrong}"


@pytest.mark.parametrize("kernel", [each for each in RESULTS if not each.endswith("simple")])
def test_a_call_that_waits_not_long_leaves_private_memory_alone(kernel):
    """The calls of the slow path, and what they copy to their stack, are not on the way."""
    outcome = collective(kernel, 4, counted=["scratch_", "flat_", "s_swappc", "ds_bpermute"])
    assert outcome.wrong is None
    executed = outcome.report.executed
    assert executed["scratch_"] == executed["s_swappc"] == executed["ds_bpermute"] == 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_host_target_has_these_bits(world_size):
    """What the tests here compare with is what a CPU computes from the same source."""
    generator = np.random.default_rng(world_size)
    values = [generator.standard_normal(1000, np.float32) for _ in range(world_size)]

    def main(comm):
        names = ("all_reduce", "reduce_scatter", "all_gather")
        return {name: getattr(comm, name)(values[comm.rank].copy()).copy() for name in names}

    of_ranks = kccl.run_threads(main, world_size)
    for kernel, results_of in RESULTS.items():
        (name,) = (each for each in of_ranks[0] if kernel.startswith(each))
        for rank, want in enumerate(results_of(values)):
            assert of_ranks[rank][name].tobytes() == want.tobytes(), (kernel, rank)


# What MEET opens for its meetings, and how its threads and ranks meet.
MEETINGS = {
    "barrier": ("", "kccl::barrier(kccl::block(), comm)"),
    "exchange": (
        "kccl::GridExchange<kKcclReachAllRanks> exchange(comm);",
        "kccl::publish(exchange, &sum, 0) != kKcclOk || kccl::collect(exchange, &sum, 0)",
    ),
}
MEET = """#include <kccl/kccl.cuh>
KCCL_KERNEL void tell(KCCL_KERNEL_PARAM(KcclDeviceComm) parameter, uint64_t tables, uint64_t sums) {
    const kccl::DeviceComm& comm = kccl::platform::first_parameter(parameter);
    const auto* const table = reinterpret_cast<const uint64_t*>(tables);
    const uint32_t size = kccl::platform::threads_per_block();
    const uint32_t thread = kccl::platform::thread_in_block();
    uint32_t sum = 0;
    OPEN
    for (uint32_t round = 1; round <= 3; ++round) {
        for (int peer = 0; peer < comm.world_size; ++peer) {
            auto* const words = reinterpret_cast<uint32_t*>(table[peer]);
            const uint32_t at = comm.rank * size + thread;
            kccl::mem::store_plain(words + at, round * 100 + comm.rank + thread);
        }
        if (MEET != kKcclOk) return;
        const auto* const words = reinterpret_cast<const uint32_t*>(table[comm.rank]);
        for (int source = 0; source < comm.world_size; ++source) {
            sum += kccl::mem::load_plain(words + source * size + (thread + 64) % size);
        }
        if (MEET != kKcclOk) return;
    }
    kccl::mem::store_plain(reinterpret_cast<uint32_t*>(sums) + thread, sum);
}
"""


@pytest.mark.parametrize(("meeting", "world_size"), list(zip(MEETINGS, (2, 4), strict=True)))
def test_ranks_see_what_the_others_wrote_before_they_met(meeting, world_size):
    """By ordinary stores to peers, which stay in the caches of a die until they are released."""
    opens, meets = MEETINGS[meeting]
    program, block = Program(compiled(MEET.replace("OPEN", opens).replace("MEET", meets))), 128
    seen = np.roll(np.arange(block, dtype=np.uint32), -64)
    want = world_size * (600 + 3 * seen) + 3 * sum(range(world_size))
    for seed in SEEDS:
        world = World(world_size)
        ranks = range(world_size)
        words = [world.array(rank, np.zeros(world_size * block, np.uint32)) for rank in ranks]
        addresses = np.array([each.ctypes.data for each in words], np.uint64)
        tables = [world.array(rank, addresses) for rank in ranks]
        sums = [world.array(rank, np.zeros(block, np.uint32)) for rank in ranks]
        launches = []
        for rank in ranks:
            pointers = np.array([tables[rank].ctypes.data, sums[rank].ctypes.data], np.uint64)
            arguments = world.comm_bytes(rank) + pointers.tobytes()
            launches.append(
                Launch(rank, program, program.symbol("_Z4tell"), arguments, block=block)
            )
        report = world.run(launches, seed=seed)
        assert report.finding is None, f"seed {seed}: {report.finding}"
        assert all((each == want).all() for each in sums), f"seed {seed}"


def test_blocks_of_a_grid_see_what_the_others_wrote():
    """Each block adds up what all blocks stored before the sync, over the dies' caches."""
    source = """#include <kccl/kccl.cuh>
KCCL_KERNEL void rounds(KCCL_KERNEL_PARAM(KcclDeviceComm) parameter, uint64_t words,
                        uint64_t sums) {
    const kccl::DeviceComm& comm = kccl::platform::first_parameter(parameter);
    auto* const mine = reinterpret_cast<uint32_t*>(words);
    auto* const out = reinterpret_cast<uint32_t*>(sums);
    const uint32_t size = kccl::platform::threads_per_block();
    const uint32_t num_blocks = kccl::platform::blocks_per_grid();
    const uint32_t thread = kccl::platform::thread_in_block();
    const uint32_t at = kccl::platform::block_in_grid() * size + thread;
    kccl::GridBarrier barrier(comm);
    uint32_t sum = 0;
    for (uint32_t round = 1; round <= 3; ++round) {
        kccl::mem::store_plain(mine + at, round * (at + 1));
        if (barrier.sync() != kccl::kKcclOk) return;
        for (uint32_t i = 0; i < num_blocks; ++i) {
            sum += kccl::mem::load_plain(mine + i * size + (thread + 64) % size);
        }
        if (barrier.sync() != kccl::kKcclOk) return;
    }
    kccl::mem::store_plain(out + at, sum);
}
""".replace("kccl::kKcclOk", "kKcclOk")
    program = Program(compiled(source))
    # Two blocks on each die.
    grid, block = 16, 128
    each = (np.arange(grid * block, dtype=np.uint32).reshape(grid, block) + 1).sum(
        0, dtype=np.uint32
    )
    want = np.tile(6 * np.roll(each, -64), grid)
    for seed in SEEDS:
        world = World(1)
        words = world.array(0, np.zeros(grid * block, np.uint32))
        sums = world.array(0, np.zeros(grid * block, np.uint32))
        arguments = (
            world.comm_bytes(0)
            + np.array([words.ctypes.data, sums.ctypes.data], np.uint64).tobytes()
        )
        launch = Launch(0, program, program.symbol("_Z6rounds"), arguments, grid, block)
        report = world.run([launch], seed=seed)
        assert report.finding is None, f"seed {seed}: {report.finding}"
        assert (sums == want).all(), f"seed {seed}"


def test_blocks_exchange_slices():
    """publish() and collect() of one rank's blocks, on all dies."""
    program = Program(compiled(f'#include "{CHAIN}"\n'))
    grid, calls = 16, 5
    for seed in SEEDS:
        world = World(1, Sizes(exchange_bytes=65536))
        out = world.array(0, np.zeros((grid, grid), np.uint64))
        arguments = (
            world.comm_bytes(0) + np.array([out.ctypes.data, calls], np.uint64).tobytes()[:12]
        )
        launch = Launch(0, program, program.symbol("_ZN4kccl3gcn9exchanges"), arguments, grid, 64)
        report = world.run([launch], seed=seed)
        assert report.finding is None, f"seed {seed}: {report.finding}"
        assert (out == (calls - 1) * 1000 + np.arange(grid, dtype=np.uint64)).all(), f"seed {seed}"


def test_blocks_of_all_ranks_exchange_slices():
    """Gathered and summed in rank order, bit for bit; slices that end within a packet."""
    world_size = 4
    arguments = "KcclDeviceComm, const float*, float*, float*, uint32_t, uint32_t"
    kernel = f"rank_exchanges<{world_size}>(const {arguments})"
    source = f'#include "{CHAIN}"\ntemplate KCCL_KERNEL void kccl::gcn::{kernel};\n'
    program = Program(compiled(source))
    symbol = program.symbol("_ZN4kccl3gcn14rank_exchanges")
    grid, count, calls = 3, 37, 5
    for seed in SEEDS:
        world = World(world_size, Sizes(exchange_bytes=8192))
        ranks = range(world_size)
        generator = np.random.default_rng(seed)
        values = generator.standard_normal((world_size, calls, grid, count), np.float32)
        inputs = [world.array(rank, values[rank]) for rank in ranks]
        gathered = [
            world.array(rank, np.zeros((grid, world_size * grid, count), np.float32))
            for rank in ranks
        ]
        sums = [
            world.array(rank, np.zeros((calls, grid, grid, count), np.float32)) for rank in ranks
        ]
        launches = []
        for rank in ranks:
            pointers = [each[rank].ctypes.data for each in (inputs, gathered, sums)]
            numbers = np.array(pointers, np.uint64).tobytes()
            numbers += np.array([count, calls], np.uint32).tobytes()
            launches.append(
                Launch(rank, program, symbol, world.comm_bytes(rank) + numbers, grid, 128)
            )
        report = world.run(launches, seed=seed)
        assert report.finding is None, f"seed {seed}: {report.finding}"
        total = values[0].copy()
        for rank in ranks[1:]:
            total = total + values[rank]
        last = values[:, -1].reshape(world_size * grid, count)
        for rank in ranks:
            assert all((each == last).all() for each in gathered[rank]), f"seed {seed}"
            for block in range(grid):
                assert sums[rank][:, block].tobytes() == total.tobytes(), f"seed {seed}"


def test_what_the_interpreter_does_not_know_is_an_error():
    with pytest.raises(Unknown, match=r"line 1: v_frobnicate_b32 v0, v1: unknown instruction"):
        Program("v_frobnicate_b32 v0, v1\n")
    with pytest.raises(Unknown, match="unknown modifier"):
        Program("global_load_dword v0, v[2:3], off dlc\n")


def test_each_figure_has_a_source():
    for name, figure in LATENCIES.items():
        is_cited = re.search(r"AMD|arXiv|the same paper|\w+/\w+", figure.source)
        assert figure.source.startswith(ASSUMED) or is_cited, name
    assert all(figure.value > 0 for figure in LATENCIES.values())
