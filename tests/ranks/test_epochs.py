"""Epochs wrap: a word that was not written for a whole period must not look valid again.

With narrow epochs (KCCL_EPOCH_BITS) a period is 16 or 256 calls.
"""

import mmap
import time

import numpy as np
import oracle
import pytest
from collectives import all_gather, reduce_scatter
from long import long_after, long_beyond_each
from programs import random_program, run_program

import kccl
from kccl.plan.specs import BY_NAME


@pytest.fixture(params=long_after(1, [4, 8]))
def period(request, monkeypatch):
    """How many calls pass until an epoch comes again."""
    monkeypatch.setenv("KCCL_EPOCH_BITS", str(request.param))
    return 1 << request.param


@pytest.mark.parametrize("world_size", long_after(1, [3, 1, 6]))
def test_random_calls(period, world_size):
    steps = random_program(world_size, 1200, seed=world_size + period)
    kccl.run_threads(lambda comm: run_program(comm, steps), world_size)


@pytest.mark.parametrize("world_size", long_after(1, [3, 5]))
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
    oracle.assert_same(out.reshape(-1), all_gather.want(inputs), algorithm, number, comm.rank)


def scatter_long(comm, algorithm, number):
    size = comm.world_size
    inputs = [oracle.exact("int32", "sum", 1024 * size, rank, number) for rank in range(size)]
    out = comm.reduce_scatter(inputs[comm.rank], algorithm=algorithm)
    want = reduce_scatter.want(inputs, comm.rank, op="sum")
    oracle.assert_same(out, want, algorithm, number, comm.rank)


def broadcast_run(comm, algorithm, number):
    """Four calls of one root; it waits for the others in none of them."""
    root = number % comm.world_size
    for part in range(4):
        want = oracle.exact("int32", "sum", 1024, root, 4 * number + part)
        x = want.copy() if comm.rank == root else np.zeros_like(want)
        comm.broadcast(x, root, algorithm=algorithm)
        oracle.assert_same(x, want, algorithm, number, part, comm.rank)


# Kernel -> the calls, and how many epochs they take.
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
    """A prepared call that writes few words of the channel."""
    if name == "barrier_direct":
        return comm.barrier
    collective = BY_NAME[name].collective
    x = np.zeros(comm.world_size if collective == "reduce_scatter" else 1, np.int32)
    return getattr(comm, collective).prepare(x, algorithm=name)


# In the short period each victim with each filler of packets, with barriers, and with its own kind;
# in the long one each victim, with barriers between its calls.
FILLERS = ("barrier_direct", *(name for name in VICTIMS if name.endswith("_ll16")))
PAIRS = long_beyond_each([4], VICTIMS, FILLERS)
PAIRS += long_after(0, [(4, name, name) for name in VICTIMS if name not in FILLERS])
PAIRS += long_after(3, [(8, victim, "barrier_direct") for victim in VICTIMS])


@pytest.mark.parametrize(("period", "victim", "between"), PAIRS, indirect=["period"])
def test_words_older_than_a_period(period, victim, between):
    """Long calls a period apart, with a late rank: the others must not take the old words for new.

    The calls between them leave most words of the slots as they are. The long calls come at every
    phase of the short period, or at every 16th phase of the long one.
    """
    run, epochs = VICTIMS[victim]

    def main(comm):
        fill = filler(comm, between)
        number = 0
        for phase in range(16):
            for late in (-1, phase % 3):
                if comm.rank == late:
                    # Meanwhile the others poll words of the period before.
                    time.sleep(0.001)
                run(comm, victim, number)
                number += 1
                # The run with a late rank has the epochs of the run before it; then comes the next
                # phase.
                fill.time(period - epochs if late < 0 else period // 16 + 1)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("gap", long_after(3, [7, 8, 9, 15, 17, 25]))
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


@pytest.mark.parametrize("period", [4], indirect=True)
def test_old_packets_behind_a_fresh_one(period):
    """Short calls rewrite only the first packet of a slot, so the packets behind it grow old.

    A page that is not mapped holds up the sender after its first packet, so the receiver reads the
    old packets before the new ones come.
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
            # Sixteen times at one phase, then at the next.
            short.time(period - (number % 16 != 15))

    # With more ranks than cores the receiver might sleep.
    kccl.run_threads(main, 2)


def test_barrier_waits_around_the_wrap(period):
    """No rank leaves a barrier before the last rank has entered it, at any epoch of the period."""
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


@pytest.mark.long
def test_processes(mpirun, monkeypatch):
    monkeypatch.setenv("KCCL_EPOCH_BITS", "4")
    assert mpirun(2, "epochs").count("right") == 2
