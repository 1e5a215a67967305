"""Ranks that make different calls, and channels that are opened twice: found, with both lines."""

import re

import numpy as np
import pytest
from long import long_after

import kccl

SOURCE = """
#include <kccl/kccl.cuh>

using namespace kccl;

KCCL_KERNEL void reduce(DeviceComm comm, float* out, float* in, uint64_t count) {
    Channel<Block> channel(block(), comm);
    barrier(channel);
    all_reduce(channel, out, in, count);  // line 9
}
KCCL_KERNEL void reduce_max(DeviceComm comm, float* out, float* in, uint64_t count) {
    Channel<Block> channel(block(), comm);
    barrier(channel);
    all_reduce<float, Max>(channel, out, in, count);  // line 14
}
KCCL_KERNEL void reduce_integers(DeviceComm comm, int32_t* out, int32_t* in, uint64_t count) {
    Channel<Block> channel(block(), comm);
    barrier(channel);
    all_reduce(channel, out, in, count);  // line 19
}
KCCL_KERNEL void gather(DeviceComm comm, float* out, float* in, uint64_t count) {
    barrier(block(), comm);
    all_gather(block(), comm, out, in, count);  // line 23
}
KCCL_KERNEL void send(DeviceComm comm, float* out, float* in, int root) {
    broadcast(warp(), comm, out, in, 4, root);  // line 26
}
KCCL_KERNEL void only_barrier(DeviceComm comm) {
    barrier(block(), comm);
    barrier(block(), comm);  // line 30
}
KCCL_KERNEL void by_grid(DeviceComm comm, float* out, float* in, uint64_t count) {
    all_reduce(grid(), comm, out, in, count);  // line 33
}
KCCL_KERNEL void on_channel(DeviceComm comm, float* out, float* in, int channel) {
    all_reduce(block(), comm, out, in, 4, channel);  // line 36
}
KCCL_KERNEL void exchange(DeviceComm comm, float* out, float* in, uint32_t count) {
    GridExchange<kKcclReachAllRanks> all(comm);
    publish(all, in, 1);
    collect(all, out + 32 * platform::block_in_grid(), 1);
    publish(all, in, count);  // line 42
    collect(all, out + 32 * platform::block_in_grid(), count);
}
KCCL_KERNEL void uneven(DeviceComm comm, float* out, float* in) {
    GridExchange<kKcclReachRank> mine(comm);
    const uint32_t count = 1 + platform::block_in_grid();
    publish(mine, in, count);  // line 48
    collect(mine, out + 32 * platform::block_in_grid(), count);
}
"""
NAMES = [
    *("reduce", "reduce_max", "reduce_integers", "gather", "send", "only_barrier", "by_grid"),
    *("on_channel", "exchange", "uneven"),
]
REDUCE = "all_reduce_one_shot_ll16"


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


def pair(kernels, last, blocks=(1, 1)):
    """A program whose ranks call these kernels with these last arguments."""

    def main(comm, module):
        device_comm = comm.device_comm(channels=4, max_bytes=64)
        which = min(comm.rank, 1)
        dtype = np.int32 if kernels[which] == "reduce_integers" else np.float32
        out, given = np.zeros(64, dtype), np.ones(64, dtype)
        arguments = () if kernels[which] == "only_barrier" else (out, given)
        arguments += () if last[which] is None else (last[which],)
        module.kernel(kernels[which])(comm, device_comm, *arguments, grid=blocks[which], block=32)

    return main


CALLS = {
    "count": (
        pair(("reduce", "reduce"), (4, 8)),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 0", 9),
        (f"{REDUCE} of 32 bytes, float32, sum, on channel 0", 9),
    ),
    "nothing": (
        pair(("reduce", "reduce"), (4, 0)),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 0", 9),
        (f"{REDUCE} of 0 bytes, float32, sum, on channel 0", 9),
    ),
    "operator": (
        pair(("reduce", "reduce_max"), (4, 4)),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 0", 9),
        (f"{REDUCE} of 16 bytes, float32, max, on channel 0", 14),
    ),
    "type": (
        pair(("reduce", "reduce_integers"), (4, 4)),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 0", 9),
        (f"{REDUCE} of 16 bytes, int32, sum, on channel 0", 19),
    ),
    "kernel": (
        pair(("reduce", "gather"), (4, 4)),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 0", 9),
        ("all_gather_direct_ll16 of 16 bytes, float32, on channel 0", 23),
    ),
    "barrier": (
        pair(("only_barrier", "gather"), (None, 4)),
        ("barrier_direct, on channel 0", 30),
        ("all_gather_direct_ll16 of 16 bytes, float32, on channel 0", 23),
    ),
    "root": (
        pair(("send", "send"), (0, 1)),
        ("broadcast_direct_ll16 of 16 bytes, float32, from root 0, on channel 0", 26),
        ("broadcast_direct_ll16 of 16 bytes, float32, from root 1, on channel 0", 26),
    ),
    "channel": (
        pair(("on_channel", "on_channel"), (0, 1)),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 0", 36),
        (f"{REDUCE} of 16 bytes, float32, sum, on channel 1", 36),
    ),
    "blocks": (
        # One unit of 16 bytes: the result would be right.
        pair(("by_grid", "by_grid"), (4, 4), (1, 2)),
        (f"{REDUCE} of 16 bytes, float32, sum, by 1 blocks, on channel 0", 33),
        (f"{REDUCE} of 16 bytes, float32, sum, by 2 blocks, on channel 0", 33),
    ),
    "slices": (
        pair(("exchange", "exchange"), (4, 5), (2, 2)),
        ("an exchange of 16 bytes a block, float32, by 2 blocks", 42),
        ("an exchange of 20 bytes a block, float32, by 2 blocks", 42),
    ),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("world_size", long_after(1, [3, 2]))
def test_calls_that_differ(module, what, world_size):
    main, *expected = CALLS[what]
    with pytest.raises(kccl.ProtocolError) as caught:
        kccl.run_threads(lambda comm: main(comm, module), world_size, backend="sim", seed=3)
    assert caught.value.kind == "calls_differ"
    told = re.fullmatch(
        r"calls differ: rank (\d) block \d thread 0 makes (.*) at source:(\d+), and rank (\d) "
        r"block \d thread 0 makes (.*) at source:(\d+); all (ranks|blocks) must make the same "
        r"call; step \d+ of seed 3, which replays it",
        str(caught.value).partition("\n")[0],
    )
    assert told, str(caught.value)
    rank, call, line, other, other_call, other_line, who = told.groups()
    both = {
        min(int(rank), 1): (call, int(line)),
        min(int(other), 1): (other_call, int(other_line)),
    }
    assert both == dict(enumerate(expected))
    assert who == ("blocks" if what == "slices" else "ranks")


def test_blocks_of_a_rank_publish_the_same(module):
    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        out, given = np.zeros(64, np.float32), np.ones(64, np.float32)
        module.kernel("uneven")(comm, device_comm, out, given, grid=2, block=32)

    with pytest.raises(kccl.ProtocolError, match=r"publish with count [12] at source:48"):
        kccl.run_threads(main, 1, backend="sim")


def test_calls_of_programs_are_compared():
    def main(comm):
        comm.broadcast(np.ones(4, np.float32), comm.rank)

    with pytest.raises(kccl.ProtocolError) as caught:
        kccl.run_threads(main, 2, backend="sim")
    text = str(caught.value).partition("\n")[0]
    for rank in range(2):
        assert (
            f"rank {rank} block 0 thread 0 makes broadcast_direct_ll16 of 16 bytes, float32, from "
            f"root {rank}, on channel 0 at a call of its program" in text
        )


def test_what_may_differ(module):
    """Numbers of blocks whose channels nobody else uses; calls of different channels; time."""
    source = """
#include <kccl/kccl.cuh>
using namespace kccl;
// Blocks other than the first make no call.
KCCL_KERNEL void first_block(DeviceComm comm, float* x) {
    if (platform::block_in_grid() == 0) all_reduce(block(), comm, x, x, 4);
}
// The ranks use the channels in different orders, each rank one by one warp.
KCCL_KERNEL void by_channel(DeviceComm comm, float* x) {
    const int warp_index = block().index() / platform::kWarpSize;
    const int channel = (warp_index + comm.rank) % comm.world_size;
    all_reduce(warp(), comm, x + 16 * channel, x + 16 * channel, uint64_t(channel + 1), channel);
}
// One rank of two sends nothing.
KCCL_KERNEL void one_side(DeviceComm comm, float* x) {
    if (platform::block_in_grid() == 0) {
        if (comm.rank == 0) signal(block(), comm, 1, 3);
        if (comm.rank == 1) wait(block(), comm, 0, 3, 1);
    }
    barrier(grid(), comm);
}
KCCL_KERNEL void nothing(DeviceComm comm, float* x) {
    for (int i = 0; i < 3; ++i) all_reduce(block(), comm, x, x, 0);
    all_reduce(block(), comm, x, x, 2);
}
"""
    names = ["first_block", "by_channel", "one_side", "nothing"]
    kernels = kccl.compile(source, names)

    def main(comm):
        device_comm = comm.device_comm(channels=4, max_bytes=64)
        x = np.ones(64, np.float32)
        for _ in range(2):
            kernels.kernel("first_block")(comm, device_comm, x, grid=1 + comm.rank, block=32)
            kernels.kernel("by_channel")(comm, device_comm, x, block=32 * comm.world_size)
            kernels.kernel("one_side")(comm, device_comm, x, grid=1 + comm.rank, block=32)
            kernels.kernel("nothing")(comm, device_comm, x, block=32)
            comm.reset()

    for seed in range(4):
        kccl.run_threads(main, 2, backend="sim", seed=seed)


# ---- Calls that some ranks make more often -------------------------------------------------------

COUNTS = """
#include <kccl/kccl.cuh>
using namespace kccl;
__global__ void broadcasts(DeviceComm comm, float* x, int count) {
    for (int i = 0; i < count; ++i) broadcast(block(), comm, x, x, 4, 0);  // line 5
}
__global__ void reduces(DeviceComm comm, float* x) {
    all_reduce(block(), comm, x, x, 4);  // line 8
}
__global__ void exchanges(DeviceComm comm, float* x, int is_max) {
    GridExchange<kKcclReachAllRanks> all(comm);
    publish(all, x, 4u);
    if (is_max == 0) collect_reduced(all, x + 8, 4u);  // line 13
    if (is_max == 1) collect_reduced<Max>(all, x + 8, 4u);  // line 14
    if (is_max == 2) collect(all, x + 8, 4u);
}
"""


@pytest.fixture(scope="module")
def counted():
    return kccl.compile(COUNTS, ["broadcasts", "reduces", "exchanges"])


def start(comm):
    return comm.device_comm(exchange_bytes=4096), np.ones(64, np.float32)


def test_a_call_more_that_nobody_noticed(counted):
    def main(comm):
        counted.kernel("broadcasts")(comm, *start(comm), 3 - comm.rank)

    call = "broadcast_direct_ll16 of 16 bytes, float32, from root 0, on channel 0 at source:5"
    with pytest.raises(kccl.ProtocolError) as caught:
        kccl.run_threads(main, 2, backend="sim", seed=2)
    assert str(caught.value) == (
        f"calls differ: rank 0 has made 3 calls, the last {call}, and rank 1 has made 2 calls, the "
        f"last {call}. All ranks must make the same calls on a channel; seed 2, which replays it"
    )


@pytest.mark.parametrize(("goes_on", "error"), [(False, kccl.PeerLost), (True, kccl.Timeout)])
def test_a_launch_less(counted, goes_on, error):
    def main(comm):
        device_comm, x = start(comm)
        for i in range(3 - comm.rank):
            # Both ranks have begun two calls by now.
            if i == 2:
                comm.timeout = 2
            counted.kernel("reduces")(comm, device_comm, x)
        if goes_on:
            comm.barrier()

    call = "all_reduce_one_shot_ll16 of 16 bytes, float32, sum, on channel 0 at source:8"
    counts = (
        f"rank 0 has made 3 calls, the last {call}, and rank 1 has made 2 calls, the last {call}"
    )
    with pytest.raises(error) as caught:
        kccl.run_threads(main, 2, backend="sim", seed=1)
    assert f"calls that differ: {counts}" in str(caught.value)
    if goes_on:
        assert (
            "; rank 0 has made 0 calls, and rank 1 has made 1 calls, the last barrier_direct, on "
            "channel 0 at a call of its program"
        ) in str(caught.value)
        assert "rank 1 block 0: 32 threads in barrier_direct, a call" in str(caught.value)


@pytest.mark.parametrize("kinds", [(0, 1), (0, 0), (1, 1), (0, 2)])
def test_reductions_of_slices_by_other_operators(counted, kinds):
    def main(comm):
        counted.kernel("exchanges")(comm, *start(comm), kinds[comm.rank])

    if kinds != (0, 1):
        kccl.run_threads(main, 2, backend="sim", seed=0)
        return
    exchange = "an exchange of 16 bytes a block, float32, {}, by 1 blocks at source:{}"
    with pytest.raises(kccl.ProtocolError) as caught:
        kccl.run_threads(main, 2, backend="sim", seed=0)
    assert exchange.format("sum", 13) in str(caught.value)
    assert exchange.format("max", 14) in str(caught.value)


# ---- Channels that are open ----------------------------------------------------------------------

TWICE = """
#include <kccl/kccl.cuh>
using namespace kccl;
KCCL_KERNEL void within(DeviceComm comm, float* x) {
    Channel<Block> channel(block(), comm);  // line 5
    all_reduce(channel, x, x, 4);
    barrier(block(), comm);  // line 7
}
KCCL_KERNEL void by_warps(DeviceComm comm, float* x) {
    Channel<Warp> channel(warp(), comm, 0);  // line 10
    all_reduce(channel, x, x, 4);
}
KCCL_KERNEL void by_blocks(DeviceComm comm, float* x) {
    Channel<Block> channel(block(), comm, 0);  // line 14
    all_reduce(channel, x, x, 4);
}
KCCL_KERNEL void one_by_one(DeviceComm comm, float* x) {
    for (uint32_t turn = 0; turn < 2; ++turn) {
        if (block().index() / platform::kWarpSize == turn) {
            for (int i = 0; i < 2; ++i) {
                Channel<Warp> channel(warp(), comm, 0);
                all_reduce(channel, x, x, 4);
            }
            { Channel<Warp> unused(warp(), comm, 0); }
        }
        block().sync();
    }
    all_reduce(block(), comm, x, x, 4);
}
"""


@pytest.mark.parametrize(
    ("kernel", "blocks", "lines"),
    [("within", 1, (7, 5)), ("by_warps", 1, (10, 10)), ("by_blocks", 2, (14, 14))],
)
def test_a_channel_opened_twice(kernel, blocks, lines):
    twice = kccl.compile(TWICE, ["within", "by_warps", "by_blocks", "one_by_one"])

    def main(comm, name=kernel, grid=blocks):
        device_comm = comm.device_comm(channels=2, max_bytes=64)
        x = np.ones(4, np.float32)
        twice.kernel(name)(comm, device_comm, x, grid=grid, block=64)

    with pytest.raises(kccl.ProtocolError) as caught:
        kccl.run_threads(main, 2, backend="sim", seed=1)
    assert caught.value.kind == "opened_twice"
    assert re.match(
        r"channel opened twice: rank (\d) block \d thread \d+ opens channel 0 at "
        rf"source:{lines[0]} while rank \1 block \d thread \d+ has it open, since "
        rf"source:{lines[1]}; on each rank one coop at a time has a channel open",
        str(caught.value),
    ), str(caught.value)
    for seed in range(4):
        kccl.run_threads(lambda comm: main(comm, "one_by_one", 1), 2, backend="sim", seed=seed)
