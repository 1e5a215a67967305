"""all_reduce gives the oracle's bits: every type, operator, algorithm and number of ranks."""

import itertools
from dataclasses import dataclass

import numpy as np
import oracle
import programs
import pytest
from long import long_after, long_beyond_each

import kccl
from kccl.backends.settings import Settings

PACKET = Settings.packet_bytes
STAGING = Settings.staging_bytes
LENGTHS = (0, 1, 2, 3, 4, 7, 8, 9, 31, 65, 515)


@dataclass(frozen=True)
class Case:
    """One call; `inputs` are all ranks'."""

    inputs: tuple
    op: str
    algorithm: str
    channel: int = 0
    in_place: bool = True


def algorithms_for(world_size, dtype):
    """Names of the algorithms that can run; "" is the plan's choice."""
    return ["", *programs.algorithms_for("all_reduce", world_size, dtype)]


def run_cases(world_size, cases):
    """Makes the calls one after the other on all ranks and compares each with the oracle."""

    def main(comm):
        results = []
        for case in cases:
            x = case.inputs[comm.rank].copy()
            keywords = dict(op=case.op, algorithm=case.algorithm, channel=case.channel)
            if case.in_place:
                assert comm.all_reduce(x, **keywords) is x
                results.append(x)
            else:
                out = np.empty_like(x)
                assert comm.all_reduce(x, out=out, **keywords) is out
                oracle.assert_same(x, case.inputs[comm.rank], "the input", case)
                results.append(out)
        return results

    results = kccl.run_threads(main, world_size)
    for number, case in enumerate(cases):
        want = oracle.all_reduce(case.inputs, case.op)
        for rank in range(world_size):
            what = (case.op, case.algorithm, f"channel {case.channel}", f"rank {rank}", number)
            oracle.assert_same(results[rank][number], want, *what)


def exact_inputs(world_size, dtype, op, count, salt=0):
    return tuple(oracle.exact(dtype, op, count, rank, salt) for rank in range(world_size))


# The host compiles a kernel for each type, and once more for two ranks. So every type runs with 2
# and with 3 ranks; each other number of ranks runs with one type, of one size or another.
MATRIX = long_beyond_each((2, 3), oracle.DTYPES)
MATRIX += long_after(3, zip((1, 5, 8, 4, 6, 7), oracle.DTYPES, strict=True))


@pytest.mark.parametrize(("world_size", "dtype"), MATRIX)
def test_matrix(world_size, dtype):
    matrix = itertools.product(
        oracle.ops_of(dtype), algorithms_for(world_size, dtype), LENGTHS, (True, False)
    )
    run_cases(
        world_size,
        [
            Case(exact_inputs(world_size, dtype, op, count, salt), op, algorithm, in_place=in_place)
            for salt, (op, algorithm, count, in_place) in enumerate(matrix)
        ],
    )


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    long_after(
        3,
        [
            (1, "float32"),
            (2, "bfloat16"),
            (3, "float64"),
            (3, "float32"),
            (3, "bfloat16"),
            (8, "int32"),
        ],
    ),
)
def test_around_slots(world_size, dtype):
    """Messages a little shorter and longer than a packet slot, a line of each rank, the staging."""
    itemsize = oracle.numpy_dtype(dtype).itemsize
    around_packets = [n * PACKET // itemsize + d for n in (1, 2) for d in (-1, 0, 1, 3)]
    lines = [n * world_size * 128 // itemsize + d for n in (1, 2) for d in (-1, 0, 1)]
    around_staging = [STAGING // itemsize + d for d in (-1, 0, 1)]
    cases = [
        Case(exact_inputs(world_size, dtype, "sum", count, count), "sum", algorithm)
        for algorithm in algorithms_for(world_size, dtype)
        for count in (*around_packets, *lines, *around_staging, 5 * STAGING // itemsize // 2 + 3)
    ]
    run_cases(world_size, cases)


@pytest.mark.parametrize(("world_size", "dtype"), long_beyond_each((2, 5, 1, 8), oracle.DTYPES))
def test_any_bits(world_size, dtype):
    """NaN of every sign and payload, both zeros, infinities, subnormals; integers that wrap."""
    rng = np.random.default_rng(world_size)
    cases = [
        Case(tuple(oracle.any_bits(dtype, 1500, rng) for _ in range(world_size)), op, algorithm)
        for op in oracle.ops_of(dtype)
        for algorithm in algorithms_for(world_size, dtype)
    ]
    run_cases(world_size, cases)


@pytest.mark.parametrize(("world_size", "dtype"), long_beyond_each((3, 8), oracle.FLOATS))
def test_bits_of_inexact_floats(world_size, dtype):
    """Element i's bits are the same on every rank, by every algorithm, channel and length."""
    rng = np.random.default_rng(7)
    inputs = [oracle.random_floats(dtype, 3001, rng) for _ in range(world_size)]
    cases = [
        Case(tuple(x[:count] for x in inputs), op, algorithm, number % 4)
        for op in ("sum", "prod", "avg")
        for number, algorithm in enumerate(algorithms_for(world_size, dtype))
        for count in (1, 6, 700, 2049, 3001)
    ]
    run_cases(world_size, cases)
    whole = oracle.all_reduce(inputs, "sum")
    reordered = oracle.all_reduce(inputs[::-1], "sum")
    assert (oracle.bits(whole) != oracle.bits(reordered)).any(), "these inputs show no order"


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_zeros_and_nans(dtype):
    """The signs of zeros and the bits of NaN, written out: they check the oracle too."""
    x = np.array([[0.0, -0.0, -0.0, np.nan, 1.0], [-0.0, 0.0, -0.0, 1.0, -np.nan]])
    inputs = tuple(x.astype(oracle.numpy_dtype(dtype)))
    quiet = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}
    nan = quiet.get(dtype, 0x7FF8000000000000)
    for op, zeros in (("min", "---"), ("max", "++-"), ("sum", "++-"), ("avg", "++-")):
        want = oracle.all_reduce(inputs, op)
        assert "".join("-" if np.signbit(zero) else "+" for zero in want[:3]) == zeros
        assert (want[:3] == 0).all() and list(oracle.bits(want)[3:]) == [nan, nan]
        run_cases(2, [Case(inputs, op, algorithm) for algorithm in algorithms_for(2, dtype)])


@pytest.mark.parametrize("dtype", oracle.INTEGERS)
def test_integers_wrap(dtype):
    info = np.iinfo(dtype)
    inputs = (np.array([info.max, info.min, info.max], dtype), np.array([1, -1, info.max], dtype))
    assert list(oracle.all_reduce(inputs, "sum")) == [info.min, info.max, -2]
    assert list(oracle.all_reduce(inputs, "prod")) == [info.max, info.min, 1]
    for op in oracle.ops_of(dtype):
        run_cases(2, [Case(inputs, op, algorithm) for algorithm in algorithms_for(2, dtype)])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unaligned(world_size):
    """Arrays may start at any byte; what lies before and behind them stays."""
    shapes = [
        (dtype, algorithm, count)
        for dtype in oracle.DTYPES
        for algorithm in algorithms_for(world_size, dtype)
        for count in (1, 3, 130, 2051)
    ]

    def main(comm):
        for salt, (dtype, algorithm, count) in enumerate(shapes):
            inputs = exact_inputs(world_size, dtype, "sum", count, salt)
            want = oracle.all_reduce(inputs, "sum").tobytes()
            offset = (1, 3, 5, 7)[(salt + comm.rank) % 4]
            before, behind = b"b" * offset, b"e" * 9
            memory = bytearray(before + inputs[comm.rank].tobytes() + behind)
            x = np.frombuffer(memory, inputs[0].dtype, count, offset)
            target = bytearray(len(memory))
            out = np.frombuffer(target, x.dtype, count, offset)
            comm.all_reduce(x, out=out, algorithm=algorithm)
            assert target == bytes(offset) + want + bytes(9), (dtype, algorithm, count)
            comm.all_reduce(x, algorithm=algorithm)
            assert memory == before + want + behind, (dtype, algorithm, count)

    kccl.run_threads(main, world_size)


def test_known_calls_follow_the_arguments():
    """C repeats a call that it has seen before, with the new call's array, type, size and op."""

    def main(comm):
        for salt in range(3):
            for dtype, count in itertools.product(oracle.DTYPES, (2, 4, 8, 16)):
                for op in ("sum", *oracle.ops_of(dtype)):
                    inputs = exact_inputs(comm.world_size, dtype, op, count, salt)
                    x = inputs[comm.rank].reshape(2, -1).copy()
                    y = inputs[comm.rank].copy()
                    # An equal string that is another object.
                    assert comm.all_reduce(x, op=op) is x
                    assert comm.all_reduce(y, op="".join(op)) is y
                    want = oracle.all_reduce(inputs, op)
                    oracle.assert_same(x.ravel(), want, dtype, op, count, salt)
                    oracle.assert_same(y, want, dtype, op, count, salt)
                inputs = exact_inputs(comm.world_size, dtype, "sum", count, salt)
                x = inputs[comm.rank].copy()
                comm.all_reduce(x)
                oracle.assert_same(x, oracle.all_reduce(inputs, "sum"), dtype, count, salt)
                for root in (0, 1, 2):
                    x = np.full(count, comm.rank + salt, inputs[0].dtype)
                    y = x.copy()
                    comm.broadcast(x, root=root)
                    comm.broadcast(y, root)
                    assert (x == root + salt).all() and (y == root + salt).all()

    kccl.run_threads(main, 3)


def test_prepared():
    """A prepared call reads what its arrays hold now."""

    def main(comm):
        x, out = np.empty(100, np.float32), np.empty(100, np.float32)
        ops = [
            (comm.all_reduce.prepare(x, out=out, algorithm=algorithm, op=op, channel=1), op)
            for algorithm in algorithms_for(comm.world_size, "float32")
            for op in ("sum", "max")
        ]
        for salt in range(20):
            for prepared, op in ops:
                inputs = exact_inputs(comm.world_size, "float32", op, 100, salt)
                x[:] = inputs[comm.rank]
                assert prepared() is out
                oracle.assert_same(out, oracle.all_reduce(inputs, op), op, salt)
        empty = np.empty(0, np.float32)
        assert comm.all_reduce.prepare(empty)() is empty

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("world_size", long_after(1, [2, 1, 3]))
def test_processes(mpirun, world_size):
    assert mpirun(world_size, "matrix").count("right") == world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_threads_may_give_the_same_array(world_size):
    """None reads the array when another one may have stored its result there."""
    shared = np.empty(STAGING // 2, np.float32)

    def main(comm):
        wrong = []
        for algorithm in algorithms_for(world_size, kccl.float32):
            for count in (1, 100, 5000, len(shared)):
                if comm.rank == 0:
                    shared.fill(1)
                comm.barrier()
                comm.all_reduce(shared[:count], algorithm=algorithm)
                comm.barrier()
                if not (shared[:count] == world_size).all():
                    wrong.append((algorithm, count))
                comm.barrier()
        return wrong

    assert kccl.run_threads(main, world_size) == [[]] * world_size
