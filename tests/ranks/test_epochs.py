"""Epochs wrap: words that were not written for a whole period must not look valid again.

Narrow epochs (KCCL_EPOCH_BITS) make a period of 16 or 256 calls.
"""

import mmap
import time

import numpy as np
import oracle
import pytest
from programs import random_program, run_program

import kccl


@pytest.fixture(params=[4, 8])
def period(request, monkeypatch):
    """Calls until an epoch comes again."""
    monkeypatch.setenv("KCCL_EPOCH_BITS", str(request.param))
    return 1 << request.param


@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_random_calls(period, world_size):
    steps = random_program(world_size, 2500, seed=world_size + period)
    kccl.run_threads(lambda comm: run_program(comm, steps), world_size)


@pytest.mark.parametrize("world_size", [3, 5])
def test_random_calls_on_channels(period, world_size):
    counts = (1, 2, 300, 5000)
    steps = random_program(world_size, 1500, seed=period, counts=counts, num_channels=4)
    kccl.run_threads(lambda comm: run_program(comm, steps), world_size)


def reduce_long(comm, algorithm, number):
    """One call that fills a packet slot."""
    inputs = [oracle.exact("int32", "sum", 1024, rank, number) for rank in range(comm.world_size)]
    x = inputs[comm.rank].copy()
    comm.all_reduce(x, algorithm=algorithm)
    oracle.assert_same(x, oracle.all_reduce(inputs, "sum"), algorithm, number, comm.rank)


def gather_long(comm, algorithm, number):
    inputs = [oracle.exact("int32", "sum", 1024, rank, number) for rank in range(comm.world_size)]
    out = comm.all_gather(inputs[comm.rank], algorithm=algorithm)
    oracle.assert_same(out.reshape(-1), oracle.all_gather(inputs), algorithm, number, comm.rank)


def scatter_long(comm, algorithm, number):
    size = comm.world_size
    inputs = [oracle.exact("int32", "sum", 1024 * size, rank, number) for rank in range(size)]
    out = comm.reduce_scatter(inputs[comm.rank], algorithm=algorithm)
    want = oracle.reduce_scatter(inputs, "sum", comm.rank)
    oracle.assert_same(out, want, algorithm, number, comm.rank)


def broadcast_run(comm, algorithm, number):
    """Four calls of one root, which does not wait for the others in any one of them."""
    root = number % comm.world_size
    for part in range(4):
        want = oracle.exact("int32", "sum", 1024, root, 4 * number + part)
        x = want.copy() if comm.rank == root else np.zeros_like(want)
        comm.broadcast(x, root, algorithm=algorithm)
        oracle.assert_same(x, want, algorithm, number, part, comm.rank)


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
# name -> the calls, and how many epochs they take
VICTIMS = {
    "all_reduce_one_shot_ll16": (reduce_long, 1),
    "all_reduce_one_shot_pull_simple": (reduce_long, 1),
    "all_reduce_two_shot_pull_simple": (reduce_long, 1),
    "reduce_scatter_direct_ll16": (scatter_long, 1),
    "reduce_scatter_pull_simple": (scatter_long, 1),
    "all_gather_direct_ll16": (gather_long, 1),
    "all_gather_pull_simple": (gather_long, 1),
    "broadcast_direct_ll16": (broadcast_run, 4),
    "broadcast_pull_simple": (broadcast_run, 4),
}


def filler(comm, name):
    """A prepared call that leaves most words of the channel as they are."""
    if name == "barrier_direct":
        return comm.barrier
    collective = next(each for each in COLLECTIVES if name.startswith(each))
    x = np.zeros(comm.world_size if collective == "reduce_scatter" else 1, np.int32)
    return getattr(comm, collective).prepare(x, algorithm=name)


@pytest.mark.parametrize("between", ["barrier_direct", *VICTIMS])
@pytest.mark.parametrize("victim", VICTIMS)
def test_words_older_than_a_period(period, victim, between):
    """A call, a period of others that do not touch its words, the call again with a late rank.

    At every phase of the period (at every 16th of the long one).
    """
    run, epochs = VICTIMS[victim]

    def main(comm):
        fill = filler(comm, between)
        number = 0
        for phase in range(16):
            for late in (-1, phase % 3):
                if comm.rank == late:
                    # Long enough for the others to take old words for new ones.
                    time.sleep(0.001)
                run(comm, victim, number)
                number += 1
                # The second run meets the epochs of the first, and the next phase is one later.
                fill.time(period - epochs if late < 0 else period // 16 + 1)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("gap", [7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_flags_half_a_period_old(monkeypatch, gap):
    """A flag word counts as reached when it is ahead by less than half a period."""
    monkeypatch.setenv("KCCL_EPOCH_BITS", "4")

    def main(comm):
        for phase in range(48):
            victim = list(VICTIMS)[phase % len(VICTIMS)]
            for between in ("barrier_direct", "all_reduce_one_shot_ll16"):
                fill = filler(comm, between)
                VICTIMS[victim][0](comm, victim, phase)
                fill.time(gap)
                if comm.rank == phase % 3:
                    time.sleep(0.0005)
                VICTIMS[victim][0](comm, victim, phase + 1)

    kccl.run_threads(main, 3)


def test_old_packets_behind_a_fresh_one(period):
    """Short calls keep the first packet of a slot fresh; those behind it grow old.

    A page that is not mapped holds up the last sender after its first packet, so that the receivers
    reach the old packets before the new ones do.
    """

    def main(comm):
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        x = np.frombuffer(memory, np.int32, 1024, mmap.PAGESIZE - 8)
        out = np.empty_like(x)
        short = filler(comm, "all_reduce_one_shot_ll16")
        for number in range(64):
            ranks = range(comm.world_size)
            inputs = [oracle.exact("int32", "sum", x.size, rank, number) for rank in ranks]
            x[:] = inputs[comm.rank]
            if comm.rank == number % 2:
                memory.madvise(mmap.MADV_DONTNEED, mmap.PAGESIZE, mmap.PAGESIZE)
                time.sleep(0.0003)
            comm.all_reduce(x, out=out, algorithm="all_reduce_one_shot_ll16")
            oracle.assert_same(out, oracle.all_reduce(inputs, "sum"), number, comm.rank)
            # Sixteen times at one phase, then at others.
            short.time(period - (number % 16 != 15))

    # Two ranks, so that the receiver is awake.
    kccl.run_threads(main, 2)


def test_barrier_waits_around_the_wrap(period):
    """Nobody leaves a barrier before the last has entered it, at every epoch of the period."""
    entered = [0, 0, 0]

    def main(comm):
        late = np.random.default_rng(0).integers(0, 3, 3 * period)
        for number in range(3 * period):
            if comm.rank == late[number]:
                time.sleep(0.0002)
            entered[comm.rank] = number + 1
            comm.barrier()
            assert min(entered) > number, (number, entered)

    kccl.run_threads(main, 3)


def test_processes(mpirun, period):
    assert mpirun(2, "epochs").count("right") == 2
