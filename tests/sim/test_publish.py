"""publish and collect in a user's kernels, on the simulator: data, orders, and failures."""

import threading
from functools import cache

import numpy as np
import publish_rounds
import pytest
from long import long_after, long_beyond_each
from publish_rounds import CASES, NOBODY, collected, slices

import kccl
from kccl.base import abi, failure
from kccl.base.abi import ffi, lib

# Each reach, order and type. The other kernels take seconds to compile.
SHORT = [
    *(("rank", "relaxed", "uint8"), ("all_ranks", "relaxed", "uint8")),
    *(("rank", "acq_rel", "float32"), ("reduced", "acq_rel", "float32")),
]


@cache
def compiled(is_short):
    cases = [case for case in CASES if (case in SHORT) == is_short]
    return kccl.compile(publish_rounds.SOURCE, [publish_rounds.name(*case) for case in cases])


def kernel_of(case):
    return compiled(case in SHORT).kernel(publish_rounds.name(*case))


def exchange(comm, device_comm, case, *, blocks, count, rounds=3, threads=32, absent=NOBODY):
    """Runs a kernel and checks what its blocks collected; returns the blocks' statuses."""
    kind, order, dtype = case
    boards, keep = np.zeros(1, np.int64), None
    num_boards, own_board = 0, 0 if kind == "rank" else comm.rank
    if order == "acq_rel":
        # Each rank's board has a word for each slice.
        keep = comm.window(4 * blocks * comm.world_size)
        addresses = [keep.addresses[comm.rank]] if kind == "rank" else keep.addresses
        boards, num_boards = np.array(addresses, np.int64), len(addresses)
    want = collected(comm, kind, rounds, blocks, count, dtype)
    out = np.full(max(want.size, 1), 0xEE, np.uint8).astype(dtype)
    statuses = np.full(blocks, 99, np.uint32)
    late = np.full(blocks * threads, 99, np.uint32)
    mine = slices(comm.rank, rounds, blocks, count, dtype).ravel()
    arrays = mine if mine.size else np.zeros(1, dtype), out
    try:
        kernel_of(case)(
            *(comm, device_comm, *arrays, np.uint32(count), np.uint32(rounds)),
            *(boards, np.uint32(num_boards), np.uint32(own_board), np.uint32(absent)),
            *(statuses, late),
            grid=blocks,
            block=threads,
        )
        assert (out[: want.size] == want.ravel()).all()
        assert not late.any() and not statuses.any()
    finally:
        del keep
    return statuses


def on_sim(main, world_size=2, *, seed=0, timeout=1000):
    return kccl.run_threads(main, world_size, backend="sim", seed=seed, timeout=timeout)


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[] if each in SHORT else pytest.mark.long) for each in CASES],
    ids="-".join,
)
def test_every_block_collects_every_slice(case):
    """Odd lengths, length 0, more packets than threads. The kernels differ in their blocks."""

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        for blocks, count in ((4, 5), (1, 9), (5, 0), (2, 67), (3, 1), (4, 130)):
            exchange(comm, device_comm, case, blocks=blocks, count=count)

    for world_size in (1, 3):
        on_sim(main, world_size, seed=world_size)


def test_both_reaches_of_one_communicator_are_independent():
    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        for i in range(6):
            case = ("rank", "all_ranks")[i % 2], "relaxed", "uint8"
            exchange(comm, device_comm, case, blocks=3, count=8 + i, rounds=1 + i % 3)

    on_sim(main)


def test_a_relaxed_exchange_orders_nothing_else():
    """The kernel counts the stores of other blocks that it does not see. An acq_rel exchange must
    have none. So some seed must show that a relaxed one can have some.
    """
    kernel = kernel_of(("rank", "relaxed", "uint8"))

    def main(comm):
        blocks, rounds, threads = 4, 4, 64
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        board = comm.window(4 * blocks)
        statuses, late = np.zeros(blocks, np.uint32), np.zeros(blocks * threads, np.uint32)
        out = np.zeros(blocks * rounds * blocks, np.uint8)
        kernel(
            *(comm, device_comm, slices(0, rounds, blocks, 1, "uint8").ravel(), out),
            *(np.uint32(1), np.uint32(rounds), np.array(board.addresses, np.int64), np.uint32(1)),
            *(np.uint32(0), np.uint32(NOBODY), statuses, late),
            grid=blocks,
            block=threads,
        )
        return int(late.sum())

    assert any(on_sim(main, 1, seed=seed)[0] for seed in range(20))


# Failures


@pytest.mark.parametrize(("reach", "rounds"), long_beyond_each(publish_rounds.REACHES, [3, 1]))
def test_a_block_that_does_not_come(reach, rounds):
    """The error names block and rank, all other blocks fail, and all go on after reset()."""
    case, blocks, lost = (reach, "relaxed", "uint8"), 4, 1

    def main(comm):
        comm.timeout = 0.01
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        absent = 2 if comm.rank == lost else NOBODY
        if comm.rank == lost or reach == "all_ranks":
            with pytest.raises(kccl.Timeout) as caught:
                exchange(
                    *(comm, device_comm, case),
                    **{"blocks": blocks, "count": 3, "rounds": rounds, "absent": absent},
                )
            told = str(caught.value)
            assert f"block 2 of rank {lost} did not arrive" in told
            assert f"wanted {rounds}, after" in told and "grid_exchange on rank " in told
            assert (caught.value.collective, caught.value.peer) == ("grid_exchange", lost)
        else:
            comm.timeout = 1000
            with pytest.raises(kccl.Timeout, match=r"block 2 of rank 1 did not.*heard it from"):
                comm.barrier()
        comm.reset()
        comm.timeout = 1000
        exchange(comm, device_comm, case, blocks=blocks, count=3)

    on_sim(main)


@pytest.mark.parametrize("reach", publish_rounds.REACHES)
def test_a_message_that_is_too_long(reach):
    """The longest message passes; with a byte more it is refused, and the error names the limit."""
    case, blocks = (reach, "relaxed", "uint8"), 2
    gates = {world_size: threading.Barrier(world_size) for world_size in (1, 2)}

    def main(comm):
        ranks = comm.world_size if reach == "all_ranks" else 1
        most = 128 * blocks * ranks
        device_comm = comm.device_comm(channels=1, max_bytes=16, exchange_bytes=most)
        exchange(comm, device_comm, case, blocks=blocks, count=128)
        # A rank that is refused fails its peers, so all must have checked their results before.
        gates[comm.world_size].wait(timeout=60)
        with pytest.raises(kccl.InvalidArgument) as caught:
            exchange(comm, device_comm, case, blocks=blocks, count=129)
        assert (
            f"has {192 * blocks * ranks} bytes, must have at most {most}, the exchange_bytes of "
            "its device_comm()"
        ) in str(caught.value)
        comm.reset()
        exchange(comm, device_comm, case, blocks=blocks, count=128)

    on_sim(main, 1)
    if reach == "all_ranks":
        on_sim(main, 2)


@pytest.mark.long
def test_too_many_blocks():
    blocks, case = abi.MAX_BLOCKS + 1, ("rank", "relaxed", "uint8")

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        message = f"grid_exchange: the kernel on rank 0 has {blocks} blocks, must have at most"
        with pytest.raises(kccl.InvalidArgument, match=message):
            exchange(comm, device_comm, case, blocks=blocks, count=1, rounds=1)
        comm.reset()
        exchange(comm, device_comm, case, blocks=2, count=1)

    on_sim(main, 1)


@pytest.mark.parametrize(
    ("status", "error", "cause"),
    [
        (lib.kKcclTimeout, kccl.Timeout, "block 7 of rank 1 did not arrive"),
        (lib.kKcclPeerLost, kccl.PeerLost, "the process of peer 1 has ended"),
        (lib.kKcclPeerLeft, kccl.PeerLost, "peer 1 has closed or dropped the communicator"),
    ],
)
def test_the_sentence_names_block_and_rank(status, error, cause):
    record = ffi.new("KcclRecord *")
    record.status, record.kernel = status, lib.kKcclGridExchange
    record.rank, record.peer, record.channel = 0, 1, 7
    record.seen, record.wanted, record.waited_ns = 4, 6, 5 * 10**8
    told = failure.error_of(status, record, 0)
    assert type(told) is error and told.peer == 1
    assert f"grid_exchange on rank 0: {cause}; rank 0 waited for block 7 of rank 1: " in str(told)
    assert "epoch seen 4, wanted 6, after 0.5 s" in str(told)


LENGTHS = """
#include <kccl/kccl.cuh>

// No arrays at all: nothing of an empty slice is read or written, and too long a slice is refused.
template <class T>
KCCL_KERNEL void meet(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm, uint32_t count, uint32_t* status) {
    kccl::GridExchange<kKcclReachAllRanks> exchange(comm);
    kccl::publish(exchange, static_cast<const T*>(nullptr), count);
    const kccl::Status met = kccl::collect(exchange, static_cast<T*>(nullptr), count);
    if (kccl::leads(kccl::block())) {
        kccl::mem::store_plain(status + kccl::platform::block_in_grid(), uint32_t(met));
    }
}
"""


@pytest.mark.long
@pytest.mark.parametrize("element", long_after(1, ["uint8_t", "double"]))
def test_an_empty_slice_has_no_array_and_the_longest_is_refused(element):
    meet = kccl.compile(LENGTHS, [f"meet<{element}>"]).kernel(f"meet<{element}>")
    all_have_met = threading.Barrier(2)

    def main(comm):
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        statuses = np.full(3, 99, np.uint32)
        meet(comm, device_comm, np.uint32(0), statuses, grid=3)
        assert not statuses.any()
        # A rank that fails would fail those whose kernels still run.
        all_have_met.wait(10)
        for count in (2**32 - 1, 2**32 - 8, 2**31):
            with pytest.raises(kccl.InvalidArgument, match="exchange_bytes"):
                meet(comm, device_comm, np.uint32(count), statuses, grid=3)
            assert (statuses == lib.kKcclMessageTooLong).all()
            comm.reset()

    on_sim(main)
