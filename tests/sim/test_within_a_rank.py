"""Waits within a rank: blocks wait for each other in grid_sync, and a ring's warps for copies."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from compilers import cxx

import kccl
from kccl.base import abi, failure
from kccl.base.abi import ffi, lib

CSRC = Path(kccl.include_dir()).parent
KERNELS = Path(__file__).parents[1] / "kernels"

SOURCE = """
#include <kccl/kccl.cuh>

// Block `absent` does not come to the sync after `count` before the others have given up.
KCCL_KERNEL void leave(kccl::DeviceComm comm, uint32_t absent, uint32_t count, uint32_t* statuses) {
    const uint32_t block = kccl::platform::block_in_grid();
    kccl::Status status = kKcclOk;
    for (uint32_t i = 0; i <= count && status == kKcclOk; ++i) {
        if (i == count && block == absent) {
            while (kccl::status_of(comm) == kKcclOk) kccl::mem::poll_pause();
            return;
        }
        status = kccl::grid_sync(comm);
    }
    if (kccl::leads(kccl::block())) kccl::mem::store_plain(statuses + block, uint32_t(status));
}

// A second barrier, or exchange, within the first; or both one after the other.
KCCL_KERNEL void open_two(kccl::DeviceComm comm, uint32_t kind, uint32_t* status) {
    uint32_t seen = 0;
    if (kind == 0) {
        kccl::GridBarrier first(comm);
        kccl::GridBarrier second(comm);
        seen = second.sync();
    } else if (kind == 1) {
        kccl::GridExchange<kKcclReachRank> first(comm);
        kccl::GridExchange<kKcclReachRank> second(comm);
        seen = second.status();
    } else {
        for (int i = 0; i < 2 && seen == kKcclOk; ++i) {
            kccl::GridBarrier barrier(comm);
            kccl::GridExchange<kKcclReachRank> local(comm);
            kccl::GridExchange<kKcclReachAllRanks> global(comm);
            kccl::grid_sync(comm);
            seen = barrier.sync() | local.status() | global.status();
        }
    }
    if (kccl::leads(kccl::block())) {
        kccl::mem::store_plain(status + kccl::platform::block_in_grid(), seen);
    }
}

using SmallRing = kccl::Ring<4, 512>;

// Each thread waits by itself for a signal that nobody sends.
KCCL_KERNEL void wait_alone(kccl::DeviceComm comm, uint32_t* statuses) {
    const uint32_t thread = kccl::block().index();
    statuses[thread] = kccl::wait(kccl::thread(), comm, comm.rank, thread, 1);
}

// Copies more than the ring has stages for, and consumes the first only.
KCCL_KERNEL void hoard(kccl::DeviceComm comm, const uint32_t* words, uint32_t* pushed,
                       uint32_t* statuses) {
    KCCL_BLOCK_SHARED(SmallRing, ring);
    kccl::init_ring(kccl::block(), ring, 1);
    kccl::Producer<SmallRing> producer(ring, comm);
    kccl::Consumer<SmallRing> consumer(ring, comm);
    uint32_t count = 0;
    kccl::Status status = kKcclOk;
    while (count < 8) {
        status = producer.push(words + 128 * count, 512, 2);
        if (status != kKcclOk) break;
        if (count == 0 && consumer.front() != nullptr) consumer.pop();
        ++count;
    }
    producer.drain();
    statuses[kccl::block().index()] = status;
    if (kccl::leads(kccl::block())) kccl::mem::store_plain(pushed, count);
}
"""


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, ["leave", "open_two", "wait_alone", "hoard"])


def on_sim(main, world_size=2, **seeds):
    return kccl.run_threads(main, world_size, backend="sim", timeout=0.01, **seeds)


# grid_sync


def test_grid_sync_of_a_single_block_does_not_wait():
    """A kernel of the host is one block: the words in the window stay 0."""

    def main(comm):
        handle = comm._backend.call("grid_sync", count=1000)
        assert lib.kccl_host_run(handle) == lib.kKcclOk
        call_comm = handle.call.comm
        words = ffi.cast("char *", call_comm.scratch[comm.rank]) + call_comm.layout.grid
        assert not any(ffi.buffer(words, abi.MAX_BLOCKS * abi.LINE_BYTES)[:])
        comm.barrier()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("count", [0, 3])
def test_a_block_that_does_not_come(module, count):
    """The error names the block, the other blocks and ranks fail, and all go on after reset()."""
    blocks, absent = 5, 3

    def main(comm):
        leave = module.kernel("leave")
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        statuses = np.full(blocks, 99, np.uint32)
        if comm.rank == 0:
            with pytest.raises(kccl.Timeout) as caught:
                leave(
                    *(comm, device_comm, np.uint32(absent), np.uint32(count), statuses),
                    grid=blocks,
                )
            told = str(caught.value)
            assert f"grid_sync on rank 0: block {absent} did not arrive" in told
            assert f"epoch seen {count}, wanted {count + 1}" in told
            assert list(statuses) == [1, 1, 1, 99, 1]
        else:
            comm.timeout = 1000
            with pytest.raises(kccl.Timeout, match=f"block {absent} did not arrive.*heard it from"):
                comm.barrier()
        comm.reset()
        comm.timeout = 1000
        leave(*(comm, device_comm, np.uint32(blocks), np.uint32(4), statuses), grid=blocks)
        assert not statuses.any()

    on_sim(main)


@pytest.mark.long
def test_too_many_blocks(module):
    """More blocks than there are words for are refused, and the rank goes on after reset()."""
    blocks = abi.MAX_BLOCKS + 1

    def main(comm):
        leave = module.kernel("leave")
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        statuses = np.zeros(blocks, np.uint32)
        arguments = comm, device_comm, np.uint32(blocks), np.uint32(1), statuses
        message = f"grid_sync: the kernel on rank 0 has {blocks} blocks, must have at most"
        with pytest.raises(kccl.InvalidArgument, match=message):
            leave(*arguments, grid=blocks, block=32)
        comm.reset()
        leave(*arguments, grid=2, block=32)
        assert not statuses[:2].any()

    on_sim(main, 1)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind, name", [(0, "grid_sync"), (1, "grid_exchange")])
def test_a_second_one_is_refused(module, kind, name, blocks):
    """A barrier or an exchange that is opened while one is open. The rank goes on after reset()."""

    def main(comm):
        open_two = module.kernel("open_two")
        device_comm = comm.device_comm(channels=1, max_bytes=16, exchange_bytes=1024)
        status = np.zeros(blocks, np.uint32)
        arguments = comm, device_comm, np.uint32(2), status
        for _ in range(2):
            open_two(*arguments, grid=blocks, block=32)
        assert not status.any()
        message = f"{name}: the kernel on rank 0 has opened a second one while one"
        with pytest.raises(kccl.InvalidArgument, match=message):
            open_two(comm, device_comm, np.uint32(kind), status, grid=blocks, block=32)
        assert (status == lib.kKcclOpenedTwice).all()
        comm.reset()
        open_two(*arguments, grid=blocks, block=32)
        assert not status.any()

    on_sim(main, 1)


def test_every_thread_gets_the_failure_of_its_wait(module):
    """Also where each thread is a coop of its own."""

    def main(comm):
        statuses = np.full(64, 99, np.uint32)
        with pytest.raises(kccl.Timeout):
            module.kernel("wait_alone")(comm, comm.device_comm(), statuses, block=64)
        assert (statuses == lib.kKcclTimeout).all()

    on_sim(main, 1, seeds=6)


# Rings


def test_copies_that_no_warp_consumes(module):
    """The producer's push times out in all its threads, the copies before it have completed, and
    the kernel ends.
    """

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        words, pushed = np.zeros(8 * 128, np.uint32), np.zeros(1, np.uint32)
        statuses = np.full(32, 99, np.uint32)
        with pytest.raises(kccl.Timeout) as caught:
            module.kernel("hoard")(comm, device_comm, words, pushed, statuses, block=32)
        told = str(caught.value)
        assert "a warp of the same block did not arrive" in told
        assert "copy 5 seen, 6 wanted" in told
        assert pushed[0] == 5
        assert (statuses == lib.kKcclTimeout).all()

    on_sim(main, 1, seeds=6)


def test_an_interrupted_rank_did_not_wait_for_itself():
    """The record names the interrupted rank as peer; the sentence says that it waited for peers."""
    record = ffi.new("KcclRecord *")
    record.status = lib.kKcclInterrupted
    record.rank = record.peer = 1
    record.kernel = lib.kKcclBarrierDirect
    record.seen, record.wanted = 4, 5
    told = str(failure.error_of(lib.kKcclInterrupted, record, 1))
    assert "rank 1 was interrupted; rank 1 waited for its peers: epoch seen 4, wanted 5" in told


def test_a_ring_on_the_host(tmp_path):
    """A block of one thread copies ahead and consumes, by turns."""
    compiler = cxx()
    program = tmp_path / "stage_sum"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{CSRC}/include", KERNELS / "stage_sum_on_host.cpp", CSRC / "host" / "idle.cpp"]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("all sums are right\n", "")
