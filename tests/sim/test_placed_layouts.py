"""Kernels use the words that the placement says: counters of grid_sync, and slices of publish. They
are read from the simulated memory behind a kernel.
"""

import ctypes
from functools import partial

import numpy as np
import pytest

import kccl
from kccl import topology
from kccl.base import abi
from kccl.base.abi import ffi, lib
from kccl.topology.layout import LINE_BYTES

SOURCE = """
#include <kccl/kccl.cuh>
using namespace kccl;
KCCL_KERNEL void calls(DeviceComm comm, uint64_t* slices, uint64_t* all, uint32_t count) {
    {
        GridBarrier barrier(comm);
        for (int i = 0; i < 3; ++i) barrier.sync();
    }
    const uint64_t mine = platform::block_in_grid();
    GridExchange<kKcclReachRank> exchange(comm);
    publish(exchange, slices + mine * count, count);
    collect(exchange, all + mine * platform::blocks_per_grid() * count, count);
}
"""
BLOCKS = 12
MACHINES = topology.recorded()


def words_of(count, warp_size, comm):
    """Runs the kernel with slices of `count` words. Returns the byte offsets of the counters that
    are not zero, and those of the lines with packets in the board, from the first of each.
    """
    device_comm = comm.device_comm(channels=1, max_bytes=64, exchange_bytes=8192)
    module = kccl.compile(SOURCE, ["calls"], warp_size=warp_size)
    slices = np.arange(1, BLOCKS * count + 1, dtype=np.uint64)
    found = np.zeros(BLOCKS * slices.size, np.uint64)
    module.kernel("calls")(
        *(comm, device_comm, slices, found, np.uint32(count)), grid=BLOCKS, block=64
    )
    assert (found.reshape(BLOCKS, -1) == slices).all()
    told = ffi.cast("KcclDeviceComm *", ffi.from_buffer(device_comm.data))
    layout = told.layout

    def lines(begin, num):
        text = ctypes.string_at(int(told.scratch[0] + begin), num * LINE_BYTES)
        used = np.frombuffer(text, np.uint8).reshape(num, LINE_BYTES).any(axis=1)
        return (np.flatnonzero(used) * LINE_BYTES).tolist()

    family = lib.kKcclGridBarriers * (abi.MAX_BLOCKS + abi.GRID_COUNTER_LINES)
    counters = lines(layout.grid + (family + abi.MAX_BLOCKS) * LINE_BYTES, abi.GRID_COUNTER_LINES)
    slots = lib.kKcclReachRank * lib.kKcclNumExchangeSlots
    # The first exchange has slot 1.
    first = layout.board + (slots + 1) * 2 * layout.exchange_bytes
    return counters, lines(first, 2 * layout.exchange_bytes // LINE_BYTES)


def offsets(name, pattern, **options):
    found = topology.place_blocks(MACHINES[name], pattern, blocks=BLOCKS, **options)
    return sorted({line * LINE_BYTES for flag in found.layout.flags for line in flag.lines})


@pytest.mark.parametrize("layout", topology.LAYOUTS)
@pytest.mark.parametrize(("name", "warp_size"), [("h200-2", 32), ("mi300x-8", 64)])
def test_grid_sync_counts_where_the_placement_says(name, warp_size, layout, monkeypatch):
    monkeypatch.setenv("KCCL_LAYOUT", layout)
    main = partial(words_of, 2, warp_size)
    ((counters, _),) = kccl.run_threads(main, 1, backend="sim", seed=1, warp_size=warp_size)
    number = topology.grid_counters(MACHINES[name], layout)
    assert number == (8 if (name, layout) == ("mi300x-8", "topology") else 1)
    assert counters == offsets(name, "grid_sync", layout="counters")[:number]


@pytest.mark.parametrize("count", [2, 8, 9])
def test_slices_of_publish_lie_where_the_placement_says(count):
    ((_, board),) = kccl.run_threads(partial(words_of, count, 32), 1, backend="sim", seed=1)
    assert board == offsets("h200-2", "publish", nbytes=BLOCKS * 8 * count)


def test_a_machine_that_tells_no_parts_has_no_number_of_counters():
    assert topology.grid_counters(None) is None
    assert topology.grid_counters(MACHINES["intel-xeon-2-cores"]) is None
    assert topology.grid_counters(None, "flat") == 1
    with pytest.raises(ValueError, match="must be one of topology, flat"):
        topology.grid_counters(None, "round")
