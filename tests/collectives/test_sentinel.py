"""all_reduce_one_shot_sentinel: words that are their own flag, and are re-armed in time."""

import mmap
import os
import threading
import time

import numpy as np
import oracle
import pytest
from long import long_after, long_beyond_each

import kccl

SENTINEL, LL16 = "all_reduce_one_shot_sentinel", "all_reduce_one_shot_ll16"
# The sentinel, and what is sent in its place.
ARMED, DISARMED = 2**64 - 1, 2**64 - 2
# Elements of 4 bytes: within one packet, around one, half a slot, a slot, several slots.
COUNTS = (1, 2, 3, 4, 5, 7, 8, 513, 1024, 1025, 3000)


def words(dtype, count, word):
    """`count` elements of an array whose 8-byte words all have these bits."""
    itemsize = oracle.numpy_dtype(dtype).itemsize
    raw = np.full(-(-count * itemsize // 8), word, np.uint64)
    return raw.view(oracle.numpy_dtype(dtype))[:count].copy()


def reduce(comm, inputs, *what, algorithm=SENTINEL, op="sum", channel=0):
    x = inputs[comm.rank].copy()
    comm.all_reduce(x, algorithm=algorithm, op=op, channel=channel)
    oracle.assert_same(x, oracle.all_reduce(inputs, op), algorithm, op, comm.rank, *what)
    return x


@pytest.mark.parametrize(("dtype", "world_size"), long_beyond_each(oracle.FLOATS, (2, 3, 8, 1)))
def test_the_bits_of_ll16(world_size, dtype):
    rng = np.random.default_rng(world_size)
    cases = [
        (op, [make(dtype, count, rng) for _ in range(world_size)])
        for op in oracle.OPS
        for make in (oracle.any_bits, oracle.random_floats)
        for count in COUNTS
    ]

    def main(comm):
        for op, inputs in cases:
            sentinel = reduce(comm, inputs, inputs[0].size, op=op)
            ll16 = reduce(comm, inputs, inputs[0].size, op=op, algorithm=LL16)
            oracle.assert_same(sentinel, ll16, op, inputs[0].size)

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_payloads_that_look_like_the_sentinel(dtype):
    """On one rank or on all; in every word, every second word, or the last element only."""

    def main(comm):
        everyone = set(range(comm.world_size))
        for count in COUNTS:
            for word in (ARMED, DISARMED, ARMED << 32 & ARMED, ARMED >> 32):
                nan, one = words(dtype, count, word), words(dtype, count, 0)
                mixed = one.copy()
                mixed[::2] = nan[::2]
                last = one.copy()
                last[-1:] = nan[-1:]
                for x in (nan, mixed, last):
                    for who in ({0}, {comm.world_size - 1}, everyone):
                        ranks = range(comm.world_size)
                        inputs = [x if rank in who else one for rank in ranks]
                        reduce(comm, inputs, count, hex(word), who)
                        reduce(comm, inputs, count, hex(word), who, op="max")

    kccl.run_threads(main, 3)


def test_the_input_stays():
    """An out-of-place call leaves sentinels in x, although it sends another word for them."""

    def main(comm):
        x = words("float32", 100, ARMED)
        out = np.zeros_like(x)
        comm.all_reduce(x, out=out, algorithm=SENTINEL)
        oracle.assert_same(x, words("float32", 100, ARMED))
        assert (oracle.bits(out) == 0x7FC00000).all()

    kccl.run_threads(main, 2)


def test_unaligned():
    """Arrays may start at any byte; what lies before and behind them stays."""

    def main(comm):
        for number, (dtype, count) in enumerate((d, n) for d in oracle.FLOATS for n in COUNTS):
            ranks = range(comm.world_size)
            inputs = [oracle.exact(dtype, "sum", count, rank, number) for rank in ranks]
            offset = (1, 3, 5, 7, 2, 4)[(number + comm.rank) % 6]
            memory = bytearray(b"b" * offset + inputs[comm.rank].tobytes() + b"e" * 17)
            x = np.frombuffer(memory, inputs[0].dtype, count, offset)
            comm.all_reduce(x, algorithm=SENTINEL)
            want = oracle.all_reduce(inputs, "sum").tobytes()
            assert memory == b"b" * offset + want + b"e" * 17, (dtype, count, comm.rank)

    kccl.run_threads(main, 3)


def run_mixture(comm, num_calls, seed, channel=0):
    """Sentinel calls of all lengths, sometimes with others between, and ranks that are late.

    Every third word of every rank is the sentinel; the others tell ranks and calls apart.
    """
    rng = np.random.default_rng(seed)
    barrier = comm.barrier.prepare(channel=channel)
    for number in range(num_calls):
        count = int(rng.choice(COUNTS))
        between = rng.integers(12)
        root = int(rng.integers(comm.world_size))
        late = int(rng.integers(3 * comm.world_size))
        ranks = range(comm.world_size)
        inputs = [oracle.exact("float32", "sum", count, rank, number) for rank in ranks]
        armed = (np.arange(count) // 2 + number) % 3 == 0
        for x in inputs:
            x[armed] = words("float32", armed.sum(), ARMED)
        if comm.rank == late:
            time.sleep(0 if number % 4 else 0.0005)
        if between == 0:
            barrier()
        elif between == 1:
            # The root runs one call ahead of the others.
            x = np.full(count, number if comm.rank == root else -1, np.int32)
            comm.broadcast(x, root, algorithm="broadcast_direct_ll16", channel=channel)
            assert (x == number).all()
        elif between == 2:
            reduce(comm, inputs, number, algorithm=LL16, channel=channel)
        elif between == 3:
            pulled = "all_reduce_one_shot_pull_simple"
            reduce(comm, inputs, number, algorithm=pulled, channel=channel)
        reduce(comm, inputs, number, channel=channel)


@pytest.mark.parametrize(
    ("world_size", "epoch_bits"), long_after(2, [(2, 4), (3, 8), (3, 4), (5, 4), (3, 32)])
)
def test_lengths_and_kinds_mixed(monkeypatch, world_size, epoch_bits):
    monkeypatch.setenv("KCCL_EPOCH_BITS", str(epoch_bits))
    kccl.run_threads(lambda comm: run_mixture(comm, 600, seed=epoch_bits), world_size)


@pytest.mark.parametrize("num_short", long_after(4, range(8)))
def test_long_calls_after_short_ones(num_short, tmp_path):
    """All words of a long call are armed, however many shorter calls came before it.

    The sender's second page must be read from disk. That holds the sender up after its first
    packet, so the receiver reads the words behind it before the new ones come.
    """
    num_calls, page, count = 32, mmap.PAGESIZE, 1024
    inputs = [
        [oracle.exact("float32", "sum", count, rank, number) for rank in range(2)]
        for number in range(num_calls)
    ]
    path = tmp_path / "inputs"
    before = page - 16
    path.write_bytes(
        b"".join(
            bytes(before) + sent.tobytes() + bytes(2 * page - before - sent.nbytes)
            for sent, _ in inputs
        )
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)

    def main(comm):
        out = np.empty(count, np.float32)
        short = comm.all_reduce.prepare(np.zeros(1, np.float32), algorithm=SENTINEL)
        for number in range(num_calls):
            x = inputs[number][comm.rank]
            if comm.rank == 0:
                x = np.frombuffer(pages, np.float32, count, 2 * page * number + before)
                assert x[0] == inputs[number][0][0]
                time.sleep(0.0003)
            comm.all_reduce(x, out=out, algorithm=SENTINEL)
            oracle.assert_same(out, oracle.all_reduce(inputs[number], "sum"), number, comm.rank)
            for _ in range(num_short):
                short()

    # With more ranks than cores the receiver might sleep.
    kccl.run_threads(main, 2)


def test_channels_have_slots_of_their_own():
    def main(comm):
        for number in range(60):
            run_mixture(comm, 3, seed=number, channel=number % comm.num_channels)

    kccl.run_threads(main, 3)


def test_after_reset():
    """reset() re-arms the slots of a call that not all ranks made, whichever slot was next."""
    all_failed = threading.Barrier(3)

    def main(comm):
        patience = comm.timeout
        for number in range(9):
            run_mixture(comm, number, seed=number)
            if comm.rank != number % 3:
                comm.timeout = 0.02
                with pytest.raises(kccl.Timeout, match=f"peer {number % 3} did not arrive"):
                    reduce(comm, [np.ones(2000, np.float32)] * 3)
            all_failed.wait(20)
            comm.timeout = patience
            comm.reset()
            run_mixture(comm, 3, seed=number)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("dtype", oracle.INTEGERS)
def test_integers_are_refused(dtype):
    def main(comm):
        x = np.ones(4, dtype)
        with pytest.raises(kccl.InvalidArgument, match=f"{dtype} has no bit pattern to spare"):
            comm.all_reduce(x, algorithm=SENTINEL)
        plan = comm.plan("all_reduce", 32, dtype)
        assert f"not {SENTINEL}: {dtype} has no" in plan.explain()
        comm.all_reduce(x)
        assert (x == comm.world_size).all()

    kccl.run_threads(main, 2)


def test_no_table_of_the_host_chooses_it():
    def main(comm):
        for nbytes in (0, 8, 512, 1 << 20):
            assert comm.plan("all_reduce", nbytes, "float32").name != SENTINEL

    kccl.run_threads(main, 2)
