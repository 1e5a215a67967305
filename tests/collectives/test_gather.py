"""all_gather and reduce_scatter give the oracle's bits: every type, operator, algorithm, length and
number of ranks, in place and not.
"""

import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np
import oracle
import programs
import pytest
from collectives import all_gather, reduce_scatter
from long import long_after, long_beyond_each

import kccl
from kccl.backends.settings import Settings

PACKET = Settings.packet_bytes
STAGING = Settings.staging_bytes
LENGTHS = (0, 1, 2, 3, 4, 7, 8, 9, 31, 65, 515)


@dataclass(frozen=True)
class Case:
    """One call; `inputs` are all ranks'. `how` is one of HOWS: where the result goes."""

    collective: str
    inputs: tuple
    op: str
    algorithm: str
    how: str
    channel: int = 0

    def want(self, rank):
        if self.collective == "all_gather":
            return all_gather.want(self.inputs)
        return reduce_scatter.want(self.inputs, rank, op=self.op)

    def keywords(self):
        op = {"op": self.op} if self.collective == "reduce_scatter" else {}
        return {"algorithm": self.algorithm, "channel": self.channel, **op}


HOWS = ("allocated", "given", "in place", "unaligned")


def algorithms_for(collective, world_size, dtype):
    """Names of the algorithms that can run; "" is the plan's choice."""
    return ["", *programs.algorithms_for(collective, world_size, dtype)]


def exact_inputs(collective, world_size, dtype, op, count, salt=0):
    """Each rank's input; a chunk has `count` elements."""
    size = count if collective == "all_gather" else count * world_size
    return tuple(oracle.exact(dtype, op, size, rank, salt) for rank in range(world_size))


def guarded(values, offset):
    """The bytes of an array, with other bytes before and behind them."""
    return bytearray(b"b" * offset + values.tobytes() + b"e" * 9)


def arrays_of(case, rank, world_size, want):
    """x, out (or None), and a check that nothing but the result was written."""
    mine = case.inputs[rank]
    if case.how == "in place":
        is_gather = case.collective == "all_gather"
        big = np.zeros(max(mine.size, want.size), mine.dtype)
        chunk = big[rank * big.size // world_size :][: big.size // world_size]
        (chunk if is_gather else big)[:] = mine
        kept = big.copy()

        def check():
            # Only this rank's chunk of x may have changed.
            if not is_gather:
                kept[rank * want.size :][: want.size] = want
                oracle.assert_same(big, kept, "x, in place", case, rank)

        return (chunk, big, check) if is_gather else (big, chunk, check)
    if case.how == "unaligned":
        before, behind = (1, 3, 5, 7)[rank % 4], (3, 2, 1)[rank % 3]
        x = np.frombuffer(guarded(mine, before), mine.dtype, mine.size, before)
        memory = guarded(np.zeros_like(want), behind)
        out = np.frombuffer(memory, want.dtype, want.size, behind)

        def check():
            oracle.assert_same(x, mine, "the input", case, rank)
            assert memory == guarded(want, behind), case

        return x, out, check
    x = mine.copy()
    out = np.zeros_like(want) if case.how == "given" else None
    return x, out, lambda: oracle.assert_same(x, mine, "the input", case, rank)


def run_cases(world_size, cases):
    """Makes the calls one after the other on all ranks and compares each with the oracle."""
    # Before the calls: a rank that computes it lets the others wait, and they need its core.
    wanted = [[case.want(rank) for rank in range(world_size)] for case in cases]

    def main(comm):
        for number, case in enumerate(cases):
            want = wanted[number][comm.rank]
            x, out, check = arrays_of(case, comm.rank, world_size, want)
            result = getattr(comm, case.collective)(x, out=out, **case.keywords())
            assert out is None or result is out
            what = (case.collective, case.op, case.algorithm, case.how, comm.rank, number)
            oracle.assert_same(result.reshape(-1), want, *what)
            check()

    kccl.run_threads(main, world_size)


# As in test_all_reduce.py; but the kernels of all_gather move bytes of any type.
MATRIX = long_beyond_each(["reduce_scatter"], oracle.DTYPES, (2, 3))
MATRIX += long_beyond_each(["all_gather"], ("bfloat16", "int64"), (2, 3))
for each in ("all_gather", "reduce_scatter"):
    others = zip([each] * 6, oracle.DTYPES, (1, 8, 5, 4, 6, 7), strict=True)
    MATRIX += long_after(2, others)


@pytest.mark.parametrize(("collective", "dtype", "world_size"), MATRIX)
def test_matrix(collective, world_size, dtype):
    ops = oracle.ops_of(dtype) if collective == "reduce_scatter" else ("sum",)
    matrix = itertools.product(ops, algorithms_for(collective, world_size, dtype), LENGTHS, HOWS)
    run_cases(
        world_size,
        [
            Case(
                collective,
                exact_inputs(collective, world_size, dtype, op, count, salt),
                op,
                algorithm,
                how,
                salt % 4,
            )
            for salt, (op, algorithm, count, how) in enumerate(matrix)
        ],
    )


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    long_after(
        2,
        [
            (2, "bfloat16"),
            (3, "float32"),
            (1, "float32"),
            (3, "float64"),
            (3, "bfloat16"),
            (8, "int32"),
        ],
    ),
)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_around_slots(collective, world_size, dtype):
    """Chunks that fill a packet slot, a part of a staging slot, or a whole one."""
    itemsize = oracle.numpy_dtype(dtype).itemsize
    sizes = (PACKET, 2 * PACKET, STAGING // world_size // 128 * 128, STAGING)
    around = [size // itemsize + d for size in sizes for d in (-1, 0, 1)]
    cases = [
        Case(
            collective,
            exact_inputs(collective, world_size, dtype, "sum", count, count),
            "sum",
            algorithm,
            how,
        )
        for algorithm in algorithms_for(collective, world_size, dtype)
        for count, how in zip(around, itertools.cycle(HOWS), strict=False)
    ]
    run_cases(world_size, cases)


@pytest.mark.parametrize(("dtype", "world_size"), long_beyond_each(oracle.DTYPES, (3, 2, 5, 1)))
def test_any_bits(world_size, dtype):
    """all_gather changes no bit; reduce_scatter reduces every bit pattern as all_reduce does."""
    rng = np.random.default_rng(world_size)
    cases = [
        Case(
            collective,
            tuple(oracle.any_bits(dtype, 300 * world_size, rng) for _ in range(world_size)),
            op,
            algorithm,
            "given",
        )
        for collective in ("all_gather", "reduce_scatter")
        for op in oracle.ops_of(dtype)
        for algorithm in algorithms_for(collective, world_size, dtype)
    ]
    run_cases(world_size, cases)


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_chunks_have_the_bits_of_all_reduce(dtype):
    """With floats whose sum depends on the order, by every algorithm of either collective."""
    rng = np.random.default_rng(7)
    inputs = [oracle.random_floats(dtype, 3 * 700, rng) for _ in range(3)]

    def main(comm):
        whole = comm.all_reduce(inputs[comm.rank].copy())
        for algorithm in algorithms_for("reduce_scatter", 3, dtype):
            mine = comm.reduce_scatter(inputs[comm.rank], algorithm=algorithm)
            for gathered in algorithms_for("all_gather", 3, dtype):
                both = comm.all_gather(mine, algorithm=gathered)
                oracle.assert_same(both.reshape(-1), whole, algorithm, gathered)

    kccl.run_threads(main, 3)


def test_known_calls_follow_the_arguments():
    """C repeats a call that it has seen before, with the new call's arrays, size and op."""

    def main(comm):
        for salt in range(6):
            for dtype, count in itertools.product(oracle.DTYPES, (2, 4, 8)):
                gathered = exact_inputs("all_gather", 3, dtype, "sum", count, salt)
                out = np.zeros(3 * count, gathered[0].dtype)
                assert comm.all_gather(gathered[comm.rank], out=out) is out
                oracle.assert_same(out, all_gather.want(gathered), dtype, count, salt)
                out[:] = 0
                mine = out[comm.rank * count :][:count]
                mine[:] = gathered[comm.rank]
                comm.all_gather(mine, out=out)
                oracle.assert_same(out, all_gather.want(gathered), dtype, count, salt)
                for op in ("sum", *oracle.ops_of(dtype)):
                    inputs = exact_inputs("reduce_scatter", 3, dtype, op, count, salt)
                    want = reduce_scatter.want(inputs, comm.rank, op=op)
                    out = np.zeros(count, want.dtype)
                    assert comm.reduce_scatter(inputs[comm.rank], out=out, op=op) is out
                    oracle.assert_same(out, want, dtype, op, count, salt)
                    x = inputs[comm.rank].copy()
                    whole = np.zeros_like(x)
                    assert comm.all_reduce(x, op=op, out=whole) is whole
                    oracle.assert_same(whole, oracle.all_reduce(inputs, op), dtype, op, salt)
                    assert comm.all_reduce(x, out=x, op="".join(op)) is x
                    oracle.assert_same(x, whole, dtype, op, salt)

    kccl.run_threads(main, 3)


def test_prepared():
    """A prepared call reads what its arrays hold now; it allocates its result once."""

    def main(comm):
        x, out = np.empty(100, np.float32), np.empty(300, np.float32)
        big, mine = np.empty(300, np.float32), np.empty(100, np.float32)
        gathers = [
            comm.all_gather.prepare(x, out=out, algorithm=algorithm, channel=1)
            for algorithm in algorithms_for("all_gather", 3, "float32")
        ]
        scatters = [
            (comm.reduce_scatter.prepare(big, out=mine, algorithm=algorithm, op=op, channel=2), op)
            for algorithm in algorithms_for("reduce_scatter", 3, "float32")
            for op in ("sum", "max")
        ]
        for salt in range(20):
            inputs = exact_inputs("all_gather", 3, "float32", "sum", 100, salt)
            x[:] = inputs[comm.rank]
            for prepared in gathers:
                out[:] = 0
                assert prepared() is out
                oracle.assert_same(out, all_gather.want(inputs), salt)
            for prepared, op in scatters:
                inputs = exact_inputs("reduce_scatter", 3, "float32", op, 100, salt)
                big[:] = inputs[comm.rank]
                assert prepared() is mine
                oracle.assert_same(mine, reduce_scatter.want(inputs, comm.rank, op=op), op, salt)
        allocated = comm.all_gather.prepare(x)
        assert allocated() is allocated() and allocated().shape == (3, 100)
        empty = comm.all_gather.prepare(x[:0])
        assert empty().shape == (3, 0)
        assert (comm.reduce_scatter.prepare(big[:0])()).shape == (0,)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize(
    ("collective", "count"),
    long_beyond_each(["all_gather", "reduce_scatter"], (3, 2000, 200_000)),
)
def test_late_ranks(collective, count):
    """No rank gets another call's data when a rank is late; short and long calls alternate."""
    rng = np.random.default_rng(count)
    late = rng.integers(0, 3, 40)
    names = algorithms_for(collective, 3, "int32")

    def main(comm):
        for number in range(40):
            if comm.rank == late[number]:
                time.sleep(0.001)
            size = count if number % 2 else 1 + number
            inputs = exact_inputs(collective, 3, "int32", "sum", size, number)
            case = Case(collective, inputs, "sum", names[number % len(names)], "given")
            got = getattr(comm, collective)(inputs[comm.rank], **case.keywords())
            oracle.assert_same(got.reshape(-1), case.want(comm.rank), number, comm.rank)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_nobody_returns_before_all_have_come(collective):
    """Each call waits for a word of every rank, so slots are free again two calls later."""
    entered = [0, 0, 0]
    lock = threading.Lock()

    def main(comm):
        x = np.zeros(3, np.float32)
        for number in range(1, 60):
            if number % 3 == comm.rank:
                time.sleep(0.0005)
            with lock:
                entered[comm.rank] = number
            getattr(comm, collective)(x, algorithm=f"{collective}_direct_ll16")
            assert min(entered) >= number

    kccl.run_threads(main, 3)
