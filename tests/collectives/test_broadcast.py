"""broadcast: every bit pattern, every root, and roots that are ahead of late ranks."""

import itertools
import threading
import time

import numpy as np
import oracle
import pytest
from long import long_after
from programs import algorithms_for

import kccl
from kccl.backends.settings import Settings

NAMES = algorithms_for("broadcast", 3, "float16")
ALGORITHMS = ["", *NAMES]
PATTERNS = np.arange(65536, dtype=np.uint16)


def message(count, number):
    return np.random.default_rng(number).integers(0, 65536, count, np.uint16).view(np.float16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_unchanged(dtype):
    def main(comm):
        for root, algorithm in itertools.product(range(comm.world_size), ALGORITHMS):
            want = PATTERNS.view(oracle.numpy_dtype(dtype))
            x = want.copy() if comm.rank == root else np.zeros_like(want)
            assert comm.broadcast(x, root, algorithm=algorithm) is x
            oracle.assert_same(x, want, algorithm, root)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_reduced(dtype):
    """No payload is taken for a flag, a missing word or a sentinel."""
    inputs = [np.roll(PATTERNS, 4099 * rank).view(oracle.numpy_dtype(dtype)) for rank in range(3)]
    wants = {op: oracle.all_reduce(inputs, op) for op in oracle.OPS}

    def main(comm):
        for op, algorithm in itertools.product(oracle.OPS, algorithms_for("all_reduce", 3, dtype)):
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, op=op, algorithm=algorithm)
            oracle.assert_same(x, wants[op], op, algorithm)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("world_size", long_after(4, [1, 2, 3, 8, 4, 5, 6, 7]))
def test_every_root_and_length(world_size):
    packets, staging = Settings.packet_bytes // 2, Settings.staging_bytes // 2
    around = [size + d for size in (packets, 2 * packets) for d in (-1, 0, 1)]
    if world_size in (2, 3):
        around += [staging + d for d in (-1, 0, 1)]

    def main(comm):
        cases = itertools.product((0, 1, 2, 3, 8, 9, 515, *around), range(world_size), ALGORITHMS)
        for number, (count, root, algorithm) in enumerate(cases):
            want = message(count, number)
            # The elements before and behind the array must stay.
            memory = np.zeros(count + 8, want.dtype)
            x = memory[4 : 4 + count]
            if comm.rank == root:
                x[:] = want
            comm.broadcast(x, root, algorithm=algorithm, channel=number % comm.num_channels)
            guarded = np.pad(want.view(np.uint16), 4).view(want.dtype)
            oracle.assert_same(memory, guarded, count, root, algorithm, comm.rank)

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_prepared_and_direct(world_size, algorithm):
    """Prepared calls and ordinary ones alternate."""

    def main(comm):
        x = np.zeros(300, np.int64)
        prepared = [
            comm.broadcast.prepare(x, root, algorithm=algorithm) for root in range(world_size)
        ]
        for number in range(60):
            root = number % world_size
            want = np.full(300, 3**number % 2**62, np.int64)
            x[:] = want if comm.rank == root else -1
            result = prepared[root]() if number % 3 else comm.broadcast(x, root)
            assert result is x
            oracle.assert_same(x, want, number)
        empty = np.empty(0, np.int64)
        assert comm.broadcast.prepare(empty, 1)() is empty
        assert comm.broadcast(empty) is empty

    kccl.run_threads(main, world_size)


def test_root_may_be_read_only():
    def main(comm):
        x = np.arange(9, dtype=np.float32)
        if comm.rank == 1:
            x.flags.writeable = False
        else:
            x[:] = 0
        comm.broadcast(x, 1)
        oracle.assert_same(x, np.arange(9, dtype=np.float32))

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("count", [3, 1000, 40_000])
@pytest.mark.parametrize("algorithm", NAMES)
def test_late_ranks(algorithm, count):
    """No rank gets another call's data when a rank is late and the root does not wait for it."""
    rng = np.random.default_rng(count)
    late = rng.integers(0, 3, 150)
    # A root can be ahead only while it stays the root.
    roots = np.concatenate([rng.integers(0, 3, 50), np.full(50, 1), np.full(50, 0)])

    def main(comm):
        for number, root in enumerate(roots):
            if comm.rank == late[number]:
                time.sleep(0.001)
            want = message(count, number)
            x = want.copy() if comm.rank == root else np.zeros_like(want)
            comm.broadcast(x, int(root), algorithm=algorithm)
            oracle.assert_same(x, want, number, root)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("algorithm", NAMES)
def test_root_is_at_most_one_call_ahead(algorithm):
    """The root returns from a call before the others enter it, but not from the next one."""
    started, root_done = threading.Event(), []

    def main(comm):
        x = np.full(700, comm.rank, np.int32)
        if comm.rank != 1:
            started.wait(10)
            # Long enough for a root that does not wait to finish all its calls.
            time.sleep(0.02)
            assert root_done == [0]
        for number in range(6):
            if comm.rank == 1:
                x[:] = number
            comm.broadcast(x, 1, algorithm=algorithm)
            assert (x == number).all()
            if comm.rank == 1:
                root_done.append(number)
                started.set()
            else:
                time.sleep(0.002)

    kccl.run_threads(main, 3)
