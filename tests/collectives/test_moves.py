"""all_to_all, reduce, gather, scatter and scan give the right bits: every type, operator,
algorithm, length, root and number of ranks, in place and not. moves.py says what is right.
"""

import itertools
from array import array

import collectives
import numpy as np
import oracle
import programs
import pytest
from long import long_after, long_beyond_each

import kccl
from kccl.backends.settings import Settings

NAMES = ("all_to_all", "gather", "reduce", "scan", "scatter")
LENGTHS = (0, 1, 2, 3, 7, 8, 31, 515)
HOWS = ("allocated", "given", "in place", "unaligned")


def unaligned(values, offset):
    """An array of the same values at an odd address."""
    memory = bytearray(offset + values.nbytes + 9)
    moved = np.frombuffer(memory, values.dtype, values.size, offset)
    moved[:] = values
    return moved


def arrays_of(name, how, x, want, rank, root):
    """x and out (or None) of one rank's call."""
    moves = collectives.load(name).MOVES
    if moves.only_root_has_x and rank != root and how != "allocated":
        return None, np.zeros_like(want)
    if want is None or how == "allocated":
        return x, None
    if how == "given":
        return x, np.zeros_like(want)
    if how == "unaligned":
        return unaligned(x, 1 + 2 * rank % 7), unaligned(0 * want, 3)
    if x.size == want.size:
        return x, x
    larger = np.zeros(max(x.size, want.size), x.dtype)
    own = larger[rank * min(x.size, want.size) :][: min(x.size, want.size)]
    if x.size > want.size:
        larger[:] = x
        return larger, own
    own[:] = x
    return own, larger


def make(comm, name, how, inputs, root, op, algorithm, channel=0):
    """Makes a call and checks what it returns, what it writes, and that x stays."""
    of_it = collectives.load(name)
    want = of_it.want(inputs, comm.rank, op=op, root=root)
    given = inputs[comm.rank]
    x, out = arrays_of(name, how, given.copy(), want, comm.rank, root)
    keywords = {"out": out} if out is not None else {}
    got = of_it.call(comm, x, op=op, root=root, algorithm=algorithm, channel=channel, **keywords)
    what = name, how, op, root, algorithm, given.size, comm.rank
    assert out is None or got is out, what
    oracle.assert_result(got, want, *what)
    is_overwritten = how == "in place" or got is x
    if x is not None and not is_overwritten:
        oracle.assert_same(x, given, "the input", *what)


MATRIX = []
for each in NAMES:
    MATRIX += long_beyond_each([each], (2, 3), oracle.DTYPES)
    others = zip([each] * 4, (4, 1, 5, 8), ("bfloat16", "int64", "float32", "float16"), strict=True)
    MATRIX += long_after(2, others)


@pytest.mark.parametrize(("name", "world_size", "dtype"), MATRIX)
def test_matrix(name, world_size, dtype):
    of_it = collectives.load(name)
    ops = oracle.ops_of(dtype) if of_it.MOVES.reduces else ("sum",)
    algorithms = ("", *programs.algorithms_for(name, world_size, dtype))
    cases = list(enumerate(itertools.product(ops, algorithms, LENGTHS, HOWS)))
    inputs = {}
    for salt, (op, _, count, _) in cases:
        size = count * world_size if of_it.HAS_CHUNKS else count
        inputs[salt] = [oracle.exact(dtype, op, size, r, salt) for r in range(world_size)]

    def main(comm):
        for salt, (op, algorithm, _, how) in cases:
            root = salt // 3 % world_size
            make(comm, name, how, inputs[salt], root, op, algorithm, salt % 4)

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize(("name", "world_size"), long_beyond_each(NAMES, (3, 2, 1)))
def test_around_slots(name, world_size):
    """Messages that fill a packet slot, a part of a staging slot, or a whole one."""
    of_it = collectives.load(name)
    staging = Settings.staging_bytes
    sizes = (Settings.packet_bytes, staging // world_size // 128 * 128, staging)
    counts = [size // 4 + d for size in sizes for d in (-1, 0, 1)]

    def main(comm):
        for algorithm in programs.algorithms_for(name, world_size, "int32"):
            for number, count in enumerate(counts):
                size = count * world_size if of_it.HAS_CHUNKS else count
                ranks = range(world_size)
                inputs = [oracle.exact("int32", "sum", size, r, number) for r in ranks]
                how, root = HOWS[number % len(HOWS)], number % world_size
                make(comm, name, how, inputs, root, "sum", algorithm)

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize(("name", "dtype"), long_beyond_each(NAMES, oracle.DTYPES))
def test_any_bits(name, dtype):
    """Copies change no bit; every bit pattern is reduced as all_reduce does it."""
    of_it = collectives.load(name)
    rng = np.random.default_rng(3)
    ops = oracle.ops_of(dtype) if of_it.MOVES.reduces else ("sum",)
    inputs = [oracle.any_bits(dtype, 300 * 3, rng) for _ in range(3)]

    def main(comm):
        for op in ops:
            for algorithm in programs.algorithms_for(name, 3, dtype):
                for root in range(3):
                    make(comm, name, "given", inputs, root, op, algorithm)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("dtype", oracle.FLOATS)
def test_the_bits_of_all_reduce(dtype):
    """reduce on its root, and scan on the last rank, with floats whose sum depends on the order."""
    rng = np.random.default_rng(7)
    inputs = [oracle.random_floats(dtype, 700, rng) for _ in range(3)]

    def main(comm):
        whole = comm.all_reduce(inputs[comm.rank].copy())
        for algorithm in programs.algorithms_for("reduce", 3, dtype):
            for root in range(3):
                got = comm.reduce(inputs[comm.rank].copy(), root, algorithm=algorithm)
                if comm.rank == root:
                    oracle.assert_same(got, whole, algorithm, root)
        for algorithm in programs.algorithms_for("scan", 3, dtype):
            got = comm.scan(inputs[comm.rank].copy(), algorithm=algorithm)
            if comm.rank == 2:
                oracle.assert_same(got, whole, algorithm)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("name", NAMES)
def test_known_calls_follow_the_arguments(name):
    """C repeats a call that it has seen before, with the new call's arrays, root and operator."""
    of_it = collectives.load(name)

    def main(comm):
        for salt in range(4):
            for count, how in itertools.product((2, 4), ("allocated", "given", "in place")):
                for root, op in itertools.product(range(3), ("sum", "max")):
                    size = count * 3 if of_it.HAS_CHUNKS else count
                    inputs = [oracle.exact("int32", op, size, r, salt) for r in range(3)]
                    make(comm, name, how, inputs, root, op, "")

    kccl.run_threads(main, 3)


def test_c_answers_calls_without_a_result():
    """Python plans each call once, with options, without a result, and without an x."""

    def main(comm):
        x, big = np.ones(4, np.float32), np.ones(8, np.float32)
        out = np.zeros(4, np.float32) if comm.rank else x
        whole = big if comm.rank == 0 else None
        part = np.zeros(4, np.float32)
        slow = []

        def calls():
            assert comm.reduce(x, 0, out=out) is (out if comm.rank == 0 else None)
            assert comm.reduce(x, root=0, out=out, op="max") is (out if comm.rank == 0 else None)
            assert comm.gather(x, 0, out=big) is (big if comm.rank == 0 else None)
            assert comm.scatter(whole, 0, out=part) is part
            assert comm.scan(x, exclusive=True) is (x if comm.rank else None)

        calls()
        for name in ("reduce", "gather", "scatter", "scan"):
            getattr(comm, name)._case = lambda *args: slow.append(args)
        calls()
        return slow

    assert kccl.run_threads(main, 2) == [[], []]


def test_prepared():
    """A prepared call reads what its arrays hold now; a rank without a result gets None."""

    def main(comm):
        x, out = np.empty(6, np.float32), np.empty(18, np.float32)
        gather = comm.gather.prepare(x, 1, out=out if comm.rank == 1 else None)
        reduce = comm.reduce.prepare(x, 2, op="max", channel=1)
        exchange = comm.all_to_all.prepare(x)
        exclusive = comm.scan.prepare(x, out=np.empty_like(x), exclusive=True)
        for salt in range(10):
            inputs = [oracle.exact("float32", "sum", 6, r, salt) for r in range(3)]
            x[:] = inputs[comm.rank]
            of_ranks = {name: collectives.load(name).want for name in NAMES}
            oracle.assert_result(gather(), of_ranks["gather"](inputs, comm.rank, root=1))
            oracle.assert_result(exchange(), of_ranks["all_to_all"](inputs, comm.rank))
            oracle.assert_result(exclusive(), of_ranks["scan"](inputs, comm.rank, root=1))
            want = of_ranks["reduce"](inputs, comm.rank, op="max", root=2)
            oracle.assert_result(reduce(), want)
        assert exchange() is exchange()
        empty = comm.gather.prepare(x[:0], 1)()
        assert empty is None if comm.rank != 1 else empty.shape == (3, 0)

    kccl.run_threads(main, 3)


def test_shapes_of_what_is_allocated():
    def main(comm):
        is_root = comm.rank == 1
        assert comm.all_to_all(np.ones((4, 3), np.int32)).shape == (4, 3)
        gathered = comm.gather(np.ones((2, 3), np.float64), 1)
        assert gathered.shape == (2, 2, 3) if is_root else gathered is None
        assert comm.scatter(np.ones((4, 3), np.float32), 1).shape == (2, 3)
        assert comm.scatter(np.ones((3, 4), np.float32), 1).shape == (6,)
        assert comm.gather(array("i", [comm.rank, 7]), 0) is None or not is_root
        assert isinstance(comm.all_to_all(array("i", [1, 2])), np.ndarray)

    kccl.run_threads(main, 2)


X4, X8 = np.ones(4, np.float32), np.ones(8, np.float32)
WRONG = {
    "all_to_all odd": ("all_to_all", (np.ones(7, "f4"),), {}, "x has 7 .*divisible by world_size"),
    "all_to_all short": ("all_to_all", (X8,), {"out": X4}, "out has 4 elements, x has 8"),
    "all_to_all next to": ("all_to_all", (X8[:4],), {"out": X8[2:6]}, "overlap"),
    "reduce root": ("reduce", (X4, 2), {}, "root is 2, must be between 0 and 1"),
    "reduce op": ("reduce", (X4,), {"op": "no"}, "op is 'no', must be one of"),
    "reduce average": ("reduce", (X4.astype("i4"),), {"op": "avg"}, "must be a float"),
    "reduce long": ("reduce", (X4,), {"out": X8}, "out has 8 elements, x has 4"),
    "gather small": ("gather", (X4,), {"out": np.ones(7, "f4")}, "out has 7 .*out must have 8"),
    "gather next to": ("gather", (X8[:4], 1), {"out": X8}, "x must be this rank's chunk of out"),
    "scatter odd": ("scatter", (np.ones(7, "f4"),), {}, "x has 7 .*divisible by world_size"),
    "scatter type": ("scatter", (X8,), {"out": np.ones(4, "i4")}, "out has dtype int32"),
    "scatter nothing": ("scatter", (None,), {}, "x is None on rank 1, must be given, or out"),
    "scatter root": ("scatter", (None, 1), {"out": X4}, "None on rank 1, must be the root's array"),
    "scan exclusive": ("scan", (X4,), {"exclusive": 1}, "exclusive is 1, must be True or False"),
    "scan op": ("scan", (X4,), {"op": None}, "op is None, must be one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    """Nothing is sent, so the next call is right."""
    name, args, keywords, message = WRONG[case]

    def main(comm):
        if comm.rank == 1:
            call = getattr(comm, name)
            for use in (call, call.prepare):
                with pytest.raises(kccl.InvalidArgument, match=message):
                    use(*args, **keywords)
        assert comm.all_to_all(X8).sum() == 8

    kccl.run_threads(main, 2)


def test_ranks_that_disagree():
    """About the root, and whether a scan is exclusive: a call that waits long finds out."""

    def main(comm):
        x = np.ones(4, np.float32)
        with pytest.raises(
            kccl.InvalidArgument, match=r"disagree.*root 0.*root 1|.*root 1.*root 0"
        ):
            # Each waits for the other, as the root.
            comm.reduce(x, comm.rank)
            comm.reduce(x, comm.rank)
            comm.barrier()
        comm.reset()
        with pytest.raises(kccl.InvalidArgument, match=r"disagree.*, exclusive"):
            comm.scan(x, exclusive=comm.rank == 0)
            comm.barrier()
        comm.reset()
        return comm.scan(np.ones(1, np.int32))[0]

    assert kccl.run_threads(main, 2) == [1, 2]
