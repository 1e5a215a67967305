"""Calls that not all threads of a coop make, or that they make differently."""

import re

import numpy as np
import pytest

import kccl

SOURCE = """
#include <kccl/kccl.cuh>
using namespace kccl;
using Args = float*;

__global__ void half_a_block(DeviceComm comm, Args out, Args in) {
    if (threadIdx.x < 32) all_reduce<float>(block(), comm, out, in, 4);
}
__global__ void leader(DeviceComm comm, Args out, Args in) {
    if (threadIdx.x == 0) all_reduce<float>(block(), comm, out, in, 4);
    __syncthreads();
}
__global__ void leader_of_warp(DeviceComm comm, Args out, Args in) {
    if (threadIdx.x == 0) all_reduce<float>(warp(), comm, out, in, 4);
    __syncwarp();
}
__global__ void early_return(DeviceComm comm, Args out, Args in) {
    if (threadIdx.x >= 4) return;
    all_reduce<float>(block(), comm, out, in, 4);
}
__global__ void block_of_grid(DeviceComm comm, Args, Args) {
    if (blockIdx.x == 0) grid_sync(comm);
}
__global__ void fewer_calls(DeviceComm comm, Args out, Args in) {
    Channel channel(block(), comm);
    for (uint32_t i = 0; i < 2 + threadIdx.x / 32; ++i) all_reduce<float>(channel, out, in, 4);
}
__global__ void other_call(DeviceComm comm, Args, Args) {
    if (threadIdx.x < 32) signal(block(), comm, comm.rank, 0);
    wait(block(), comm, comm.rank, 0, 1);
}
__global__ void other_count(DeviceComm comm, Args out, Args in) {
    all_reduce<float>(block(), comm, out, in, threadIdx.x < 32 ? 4 : 3);
}
__global__ void own_address(DeviceComm comm, Args out, Args in) {
    all_reduce<float>(block(), comm, out + threadIdx.x, in, 1);
}
__global__ void half_waits(DeviceComm comm, Args out, Args in) {
    if (threadIdx.x < 32) {
        all_reduce<float>(block(), comm, out, in, 4);
    } else {
        while (mem::load<mem::Order::kAcquire, mem::Scope::kSystem>((uint32_t*)out) == 0) {
            mem::poll_pause();
        }
    }
}
__global__ void half_loops(DeviceComm comm, Args out, Args in) {
    if (threadIdx.x < 32) all_reduce<float>(block(), comm, out, in, 4);
    __syncthreads();
    if (threadIdx.x >= 32) all_reduce<float>(block(), comm, out, in, 4);
}

__global__ void nothing_published(DeviceComm comm, Args out, Args) {
    GridExchange<kKcclReachRank> exchange(comm);
    collect(exchange, out + 8 * blockIdx.x, 4);
}
__global__ void published_twice(DeviceComm comm, Args out, Args in) {
    GridExchange<kKcclReachRank> exchange(comm);
    publish(exchange, in, 1u);
    publish(exchange, in, 1u);
    collect(exchange, out + 8 * blockIdx.x, 1u);
}
__global__ void longer_slices(DeviceComm comm, Args out, Args in) {
    GridExchange<kKcclReachRank> exchange(comm);
    publish(exchange, in, 1u);
    collect(exchange, out + 8 * blockIdx.x, 4u);
}
__global__ void never_collected(DeviceComm comm, Args, Args in) {
    GridExchange<kKcclReachRank> exchange(comm);
    publish(exchange, in, 1u);
}
__global__ void own_slices(DeviceComm comm, Args out, Args in) {
    GridExchange<kKcclReachAllRanks> exchange(comm);
    publish(exchange, in, 1u);
    collect_reduced(exchange, out + 8 * blockIdx.x, 1u, Slices{blockIdx.x, 1});
}
__global__ void one_publishes(DeviceComm comm, Args out, Args in) {
    GridExchange<kKcclReachRank> exchange(comm);
    if (blockIdx.x == 0) publish(exchange, in, 1u);
    collect(exchange, out + 8 * blockIdx.x, 1u);
}

__global__ void lone_thread(DeviceComm comm, Args, Args) {
    if (threadIdx.x == 0) wait(thread(), comm, 1 - comm.rank, 1, 1);
    __syncthreads();
}

// What is right: blocks and warps of their own channels, a warp that has nothing more to do, and
// exchanges of which the blocks collect different parts.
__global__ void right(DeviceComm comm, Args out, Args in) {
    all_reduce<float>(grid(), comm, out, in, 4);
    if (threadIdx.x / 32 == blockIdx.x) {
        all_reduce<float>(warp(), comm, out + 32 + 4 * blockIdx.x, in, 4);
    }
    __syncthreads();
    GridExchange<kKcclReachRank> exchange(comm);
    publish(exchange, in, 1u);
    collect(exchange, out + 8 * (1 + blockIdx.x), 1u, Slices{1 - blockIdx.x, 1});
    if (threadIdx.x >= 32) return;
    all_reduce<float>(warp(), comm, out + 40 + 4 * blockIdx.x, in, 4);
}
// Threads that have ended are not waited for.
__global__ void right_ends(DeviceComm comm, Args, Args) {
    if (threadIdx.x % 4 == 1) return;
    __syncthreads();
    __syncwarp();
    if (threadIdx.x != 0) return;
    signal(thread(), comm, 1 - comm.rank, blockIdx.x);
    wait(thread(), comm, 1 - comm.rank, blockIdx.x, 1);
}
"""
NAMES = re.findall(r"__global__ void (\w+)\(", SOURCE)
OUT = r"byte \d+ of `out` \(argument 1 of own_address\)"
THREAD = r"rank \d block \d thread \d+"
TWICE = "Every block calls publish, then collect, once each"


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


def lines_of(kernel):
    """The numbers of the source's lines from this kernel on, as reports name them."""
    (first,) = [n for n, line in enumerate(SOURCE.splitlines(), 1) if f"void {kernel}(" in line]
    return [f"source:{first + i}" for i in range(12)]


def run(module, kernel, grid, seed):
    def main(comm):
        out, in_ = np.zeros(64, np.float32), np.ones(64, np.float32)
        device_comm = comm.device_comm(channels=8, max_bytes=1024, exchange_bytes=4096)
        module.kernel(kernel)(comm, device_comm, out, in_, grid=grid, block=64)

    kccl.run_threads(main, 2, backend="sim", seed=seed)


MISTAKES = {
    "half_a_block": (1, r"call not made by all: rank \d block 0 threads 32 to 63 did not call "
    r"all_reduce, which block 0 thread \d+ called at {1}; block 0 thread \d+ has ended. All "
    r"threads of the block must make this call"),
    "leader": (1, r"call not made by all: rank \d block 0 threads 1 to 63 did not call all_reduce, "
    r"which block 0 thread 0 called at {1}; block 0 thread \d+ waits at {2}. All threads of the "
    r"block must make this call"),
    "leader_of_warp": (1, r"call not made by all: rank \d block 0 threads 1 to 31 did not call "
    r"all_reduce, which block 0 thread 0 called at {1}; block 0 thread \d+ waits at {2}. All "
    r"threads of the warp must make this call"),
    "early_return": (1, r"call not made by all: rank \d block 0 threads 4 to 63 did not call "
    r"all_reduce, which block 0 thread \d called at {2}; block 0 thread \d+ has ended. All "
    r"threads of the block must make this call"),
    "block_of_grid": (2, r"call not made by all: rank \d block 1 threads 0 to 63 did not call "
    r"grid_sync, which block 0 thread \d+ called at {1}; block 1 thread \d+ has ended. All "
    r"threads of the grid must make this call"),
    "fewer_calls": (1, r"call not made by all: rank \d block 0 threads 0 to 31 did not call "
    r"all_reduce, which block 0 thread \d+ called at {2}; block 0 thread \d+ waits at {3}. All "
    r"threads of the block must make this call"),
    "other_call": (1, rf"threads differ: {THREAD} calls \w+ at {{.}}, and {THREAD} calls \w+ at "
    r"{{.}}. All threads of the block must make the same calls in the same order"),
    "other_count": (1, rf"arguments differ: {THREAD} calls all_reduce with count \d at {{1}}, and "
    rf"{THREAD} with count \d at {{1}}. All threads of the block must give the same count"),
    "own_address": (1, rf"arguments differ: {THREAD} calls all_reduce with out {OUT} at {{1}}, and "
    rf"{THREAD} with out {OUT} at {{1}}. All threads of the block must give the same out"),
    "lone_thread": (1, r"call not made by all: rank \d block 0 threads 1 to 31 did not call wait, "
    r"which block 0 thread 0 called at {1}; block 0 thread \d+ waits at {2}. All threads of a warp "
    r"must be in such a call together, because it polls together"),
    "half_waits": (1, r"deadlock: 128 threads wait and nothing can change any more: .* rank \d "
    r"block 0 threads 32 to 63 did not call all_reduce, which block 0 thread \d+ called at {2}"),
    "half_loops": (1, r"call not made by all: rank \d block 0 threads 32 to 63 did not call "
    r"all_reduce, which block 0 thread \d+ called at {1}; block 0 thread \d+ waits at {2}. All "
    r"threads of the block must make this call"),
    "nothing_published": (2, rf"nothing to collect: {THREAD} at {{2}} calls collect, but its block "
    rf"has published nothing since it collected last. {TWICE}"),
    "published_twice": (2, rf"published twice: {THREAD} at {{3}} calls publish, but its block has "
    rf"not collected the slices that it published at {{2}}. {TWICE}"),
    "longer_slices": (2, rf"lengths differ: {THREAD} at {{3}} calls collect for slices of 16 "
    r"bytes, but its block published 4 bytes at {2}. Give publish and collect the same count"),
    "never_collected": (2, rf"never collected: {THREAD} at {{3}} closes its GridExchange, but its "
    rf"block has not collected the slices that it published at {{2}}. {TWICE}"),
    "own_slices": (2, rf"never read by others: {THREAD} at {{3}} calls collect_reduced as the last "
    r"block of its rank, and no block there but its publisher has collected slice \d, block 0's of "
    r"rank \d. Where a rank has two blocks or more, each slice must be collected on it by a block "
    r"other than the one that published it"),
    "one_publishes": (2, rf"(threads differ: {THREAD} calls \w+ at {{.}}, and {THREAD} calls \w+ "
    rf"at {{.}}. All threads of the grid must make the same calls in the same order|nothing to "
    rf"collect: {THREAD} at {{3}} calls collect, but its block has published nothing since it "
    rf"collected last. {TWICE})"),
}  # fmt: skip


@pytest.mark.parametrize("kernel", MISTAKES)
def test_a_mistake_has_its_sentence_in_every_seed(module, kernel):
    grid, wanted = MISTAKES[kernel]
    lines = lines_of(kernel)
    pattern = re.sub(
        r"\{+(\d|\.)\}+", lambda m: lines[int(m[1])] if m[1] != "." else r"source:\d+", wanted
    )
    for seed in range(3):
        with pytest.raises(kccl.ProtocolError) as caught:
            run(module, kernel, grid, seed)
        told = str(caught.value).splitlines()[0]
        assert re.fullmatch(rf"{pattern}; step \d+ of seed {seed}, which replays it", told)


@pytest.mark.parametrize("kernel", ["right", "right_ends"])
def test_what_is_right_has_no_finding(module, kernel):
    for seed in range(6):
        run(module, kernel, 2, seed)
