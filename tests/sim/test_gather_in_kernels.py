"""all_gather and reduce_scatter inside kernels: by a block, by warps, by a grid; on simulated GPUs,
and compiled for a real one.
"""

import itertools
from functools import cache

import numpy as np
import oracle
import pytest
from collectives import all_gather
from device_compilers import find_nvrtc

import kccl
from kccl.base.abi import lib

SOURCE = """
#include <kccl/kccl.cuh>

template <class T>
KCCL_KERNEL void by_block(kccl::DeviceComm comm, T* gathered, T* reduced, const T* x, uint64_t count) {
    const kccl::Block block = kccl::block();
    kccl::all_gather<T>(block, comm, gathered, x, count);
    block.sync();
    kccl::reduce_scatter<T, kccl::Max>(block, comm, reduced, gathered, count);
}

// The same on a channel that stays open, in place.
template <class T>
KCCL_KERNEL void in_place(kccl::DeviceComm comm, T* gathered, T* reduced, const T* x, uint64_t count) {
    kccl::Channel<kccl::Block> channel(kccl::block(), comm);
    T* mine = gathered + comm.rank * count;
    for (uint64_t i = channel.thread(); i < count; i += channel.num_threads()) mine[i] = x[i];
    kccl::block().sync();
    for (int turn = 0; turn < 3; ++turn) kccl::all_gather<T>(channel, gathered, mine, count);
    kccl::reduce_scatter<T, kccl::Max>(channel, mine, gathered, count);
    for (uint64_t i = channel.thread(); i < count; i += channel.num_threads()) reduced[i] = mine[i];
    kccl::block().sync();
    kccl::all_gather<T>(channel, gathered, mine, count);
}

// Each warp has a part of every chunk.
template <class T>
KCCL_KERNEL void by_warps(kccl::DeviceComm comm, T* gathered, T* reduced, const T* x, uint64_t count) {
    const uint64_t warps = kccl::block().size() / kccl::warp().size();
    const uint64_t begin = kccl::default_channel(kccl::warp()) * (count / warps);
    kccl::Channel<kccl::Warp> channel(kccl::warp(), comm);
    kccl::all_gather<T>(channel, gathered + begin, x + begin, count / warps, count);
    kccl::warp().sync();
    kccl::reduce_scatter<T, kccl::Max>(channel, reduced + begin, gathered + begin, count / warps, count);
}

template <class T>
KCCL_KERNEL void by_grid(kccl::DeviceComm comm, T* gathered, T* reduced, const T* x, uint64_t count) {
    kccl::all_gather<T>(kccl::grid(), comm, gathered, x, count);
    kccl::reduce_scatter<T, kccl::Max>(kccl::grid(), comm, reduced, gathered, count);
}
"""  # noqa: E501
SHAPES = {
    "by_block": {"block": 64},
    "in_place": {"block": 64},
    "by_warps": {"block": 64},
    "by_grid": {"grid": 3, "block": 32},
}
TYPES = {"float": "float32", "kccl::bf16": "bfloat16", "int64_t": "int64"}


# A type for each shape: the other pairs would show nothing more, and take half a minute to compile.
PAIRS = list(zip(SHAPES, itertools.cycle(TYPES), strict=False))


@cache
def compiled():
    return kccl.compile(SOURCE, [f"{name}<{element}>" for name, element in PAIRS])


def kernel_of(name, element):
    return compiled().kernel(f"{name}<{element}>")


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, 1 + [*TYPES].index(element)) for name, element in PAIRS]
)
def test_on_simulated_gpus(name, world_size):
    element = list(TYPES)[world_size - 1]
    kernel = kernel_of(name, element)

    def main(comm):
        device_comm = comm.device_comm(channels=4, max_bytes=2048)
        for turn, count in itertools.product(range(2), (2, 34, 150)):
            inputs = [
                oracle.exact(TYPES[element], "sum", count, rank, turn) for rank in range(world_size)
            ]
            x, gathered = inputs[comm.rank], all_gather.want(inputs)
            out, mine = np.zeros_like(gathered), np.zeros_like(x)
            kernel(comm, device_comm, out, mine, x, count, **SHAPES[name])
            # All ranks reduce the same: what was gathered.
            oracle.assert_same(mine, inputs[comm.rank], name, count, comm.rank)
            oracle.assert_same(out, gathered, name, count, comm.rank)

    kccl.run_threads(main, world_size, backend="sim", seed=world_size)


@pytest.mark.parametrize("is_too_long", [False, True])
@pytest.mark.parametrize("name", ["by_block", "by_grid"])
def test_length_of_a_chunk(name, is_too_long):
    """The limit holds for the bytes that one rank sends another, not for the whole array."""
    blocks = SHAPES[name].get("grid", 1)
    # 64 bytes a block, or 80.
    count = (20 if is_too_long else 16) * blocks
    kernel = kernel_of(name, "float")

    def main(comm):
        device_comm = comm.device_comm(channels=4, max_bytes=64)
        x, mine = np.ones(count, np.float32), np.zeros(count, np.float32)
        out = np.zeros(2 * count, np.float32)
        if is_too_long:
            with pytest.raises(kccl.InvalidArgument, match=r"all_gather_direct_ll16.* 80 .* 64"):
                kernel(comm, device_comm, out, mine, x, count, **SHAPES[name])
            return
        kernel(comm, device_comm, out, mine, x, count, **SHAPES[name])
        assert (out == 1).all() and (mine == 1).all()

    kccl.run_threads(main, 2, backend="sim")


@pytest.mark.long
@pytest.mark.takes(16)
@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
def test_they_compile_for_a_gpu():
    kernels = [f"{name}<float>" for name in SHAPES]
    module = kccl.compile(SOURCE, kernels, target="cuda", arch="sm_90a")
    assert module.names == tuple(kernels)


NOTHING = """
#include <kccl/kccl.cuh>
#include <kccl/kernels/all_gather_push_simple.cuh>
#include <kccl/kernels/all_reduce_two_shot_push_simple.cuh>
#include <kccl/kernels/broadcast_push_simple.cuh>
#include <kccl/kernels/reduce_scatter_push_simple.cuh>

// The first call is too long; the others are of nothing, each on a channel opened for it.
KCCL_KERNEL void call_nothing(kccl::DeviceComm comm, float* x, uint32_t* statuses) {
    const kccl::Block coop = kccl::block();
    kccl::Status status[9];
    status[0] = kccl::all_reduce<float>(coop, comm, x, x, 0);
    status[1] = kccl::all_reduce<float>(coop, comm, x, x, 1000);
    status[2] = kccl::all_reduce<float>(coop, comm, x, x, 0);
    status[3] = kccl::broadcast<float>(coop, comm, x, x, 0, 0);
    status[4] = kccl::all_gather<float>(coop, comm, x, x, 0);
    {
        kccl::Channel channel(coop, comm, 0, 0, kccl::Opening::kOneCall);
        status[5] = kccl::all_reduce_two_shot_push_simple<float, kccl::Sum>(channel, x, x, 0);
        status[6] = kccl::broadcast_push_simple(channel, nullptr, nullptr, 0, 0);
        status[7] = kccl::all_gather_push_simple(channel, nullptr, nullptr, 0, 0);
        status[8] = kccl::reduce_scatter_push_simple<float, kccl::Sum>(channel, x, x, 0, 0);
    }
    for (int i = 0; i < 9; ++i) {
        if (leads(coop)) kccl::mem::store_plain(statuses + i, static_cast<uint32_t>(status[i]));
    }
}
"""


def test_empty_calls_say_that_the_communicator_has_failed():
    """They exchange nothing, but return the failed status of an earlier call."""
    kernel = kccl.compile(NOTHING, ["call_nothing"]).kernel("call_nothing")

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=64)
        x, statuses = np.zeros(1000, np.float32), np.full(9, 99, np.uint32)
        with pytest.raises(kccl.InvalidArgument, match="4000"):
            kernel(comm, device_comm, x, statuses, block=64)
        return statuses

    for statuses in kccl.run_threads(main, 2, backend="sim"):
        assert statuses[0] == lib.kKcclOk
        assert set(statuses[1:]) == {statuses[1]} != {lib.kKcclOk}
