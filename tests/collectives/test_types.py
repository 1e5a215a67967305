"""Every element type and operator, bit by bit: what a reduction promises of special values.

    accumulated   in rank order; floats of 8, 16 and 32 bits in float32, float64 in float64; a sum
                  in the accumulator is rounded at each addition, and at the end to the type
    avg           the sum in the accumulator, divided there by the number of ranks
    NaN           of any sign and payload gives the canonical NaN; in min and max too
    -0            is below +0
    subnormals    are kept
    float8        e4m3fn becomes NaN when it is too large, e5m2 infinite, as in ml_dtypes
    integers      wrap
    bool          sum and max are "or", prod and min "and"; a byte that is not 0 counts as True
    complex       a product is two products and a sum a part, each rounded by itself

The oracle computes the same with NumPy.
"""

import ctypes
import inspect
import itertools
import sys

import collectives
import ml_dtypes
import numpy as np
import oracle
import programs
import pytest
from long import long_after, long_beyond_each

import kccl
from kccl.base import dtypes
from kccl.plan.ops import OPS, ops_of

RNG = np.random.default_rng(11)


def special(name):
    """A few values of a type that a reduction may get wrong."""
    dtype = oracle.numpy_dtype(name)
    if dtype.kind == "c":
        parts = special("float32" if name == "complex64" else "float64")[::3]
        return np.array([complex(*pair) for pair in itertools.product(parts, parts)], dtype)
    if name == "bool":
        return np.array([False, True, True, False, True])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        near = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 3, info.max // 2 + 1]
        return np.array([*near, *([-1, -3] if info.min else [])], dtype)
    info = ml_dtypes.finfo(dtype)
    edges = [info.max, info.smallest_normal, info.smallest_subnormal, info.eps, 1, 1 + info.eps]
    numbers = [sign * float(edge) for edge in edges for sign in (1, -1)]
    with np.errstate(all="ignore"):
        found = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, *numbers], np.float64).astype(dtype)
    others = oracle.bits(np.full(2, np.nan).astype(dtype))
    # NaN of another sign and another payload.
    others ^= np.array([1 << (8 * dtype.itemsize - 1), 1], others.dtype)
    return np.concatenate([found, others.view(dtype)[: 1 if name == "float8_e4m3fn" else 2]])


def every_pair(name, world_size):
    """Arrays in which each special value meets each other one, and some random bits."""
    values = special(name)
    count = values.size**2
    inputs = [np.repeat(values, values.size), np.tile(values, values.size)]
    inputs += [np.roll(RNG.permutation(inputs[k % 2]), k) for k in range(2, world_size)]
    noise = RNG.integers(0, 2 if name == "bool" else 256, (world_size, 400), np.uint8)
    some = noise[:, : 400 // values.itemsize * values.itemsize].copy().view(values.dtype)
    return [np.concatenate([x[:count], each]) for x, each in zip(inputs, some, strict=False)]


def check(inputs, ops, *, backend="host", algorithms=("",)):
    """Reduces the ranks' inputs in every way, and compares each with the oracle."""
    name = inputs[0].dtype.name
    world_size = len(inputs)
    calls = list(itertools.product(ops, algorithms))

    def main(comm):
        mine = inputs[comm.rank]
        whole = mine[: mine.size // world_size * world_size]
        return [
            (
                comm.all_reduce(mine.copy(), op=op, algorithm=algorithm),
                comm.reduce_scatter(whole, op=op),
            )
            for op, algorithm in calls
        ]

    results = kccl.run_threads(main, world_size, backend=backend)
    chunk = inputs[0].size // world_size
    for rank, found in enumerate(results):
        for (op, algorithm), (reduced, scattered) in zip(calls, found, strict=True):
            what = name, op, algorithm, f"rank {rank} of {world_size}"
            want = oracle.all_reduce(inputs, op)
            oracle.assert_same(reduced, want, *what)
            oracle.assert_same(scattered, want[rank * chunk : (rank + 1) * chunk], *what)


@pytest.mark.parametrize(("name", "world_size"), long_beyond_each(oracle.EVERY_DTYPE, (3, 8)))
def test_special_values(name, world_size):
    algorithms = ["", *programs.algorithms_for("all_reduce", world_size, name)]
    inputs = every_pair(name, world_size)
    check(inputs, ops_of(dtypes.of(name)), algorithms=algorithms)
    # Fewer elements than a word, and a part of one.
    for count in (1, 3, 9):
        check([x[:count].copy() for x in inputs], ("sum",), algorithms=algorithms)


@pytest.mark.parametrize("name", oracle.SMALL_FLOATS)
def test_every_pair_of_small_floats(name):
    """So every value is widened, and every rounding of a sum and a product is tried."""
    values = np.arange(256, dtype=np.uint8).view(oracle.numpy_dtype(name))
    inputs = [np.repeat(values, 256), np.tile(values, 256)]
    check(inputs, ("sum", "prod", "avg"))
    check([*inputs, np.roll(inputs[0], 77)], ("sum", "avg"))


def test_too_large_a_float8_is_rounded_as_in_ml_dtypes():
    def main(comm):
        found = []
        for name, x in (("float8_e4m3fn", [448, 240, -448]), ("float8_e5m2", [57344, 0, -57344])):
            x = np.array(x).astype(oracle.numpy_dtype(name))
            found.append(comm.all_reduce(x).astype(np.float32).tolist())
        return found

    e4m3, e5m2 = kccl.run_threads(main, 2)[0]
    assert np.isnan([e4m3[0], e4m3[1], e4m3[2]]).all() and e5m2 == [np.inf, 0, -np.inf]


@pytest.mark.parametrize("world_size", [3, 10])
def test_an_average_is_infinite_where_its_sum_is(world_size):
    """float16 is added in float32, so its average is not."""

    def main(comm):
        found = []
        for name, value in (("float32", 3e38), ("bfloat16", 3e38), ("float16", 6e4)):
            x = np.full(world_size, value).astype(oracle.numpy_dtype(name))
            part = comm.reduce_scatter(x, op="avg")
            found += [*comm.all_reduce(x.copy(), op="avg"), *part, x[0]]
        return np.array(found, np.float64).reshape(3, -1).tolist()

    for one, two, half in kccl.run_threads(main, world_size):
        assert np.isinf(one[:-1]).all() and np.isinf(two[:-1]).all()
        assert half == half[-1:] * len(half)


def test_float32_is_rounded_at_each_addition():
    def main(comm):
        x = np.array([1 if comm.rank == 0 else 2**-24] * 3, np.float32)
        return comm.all_reduce(x.astype(np.float64))[0], *comm.all_reduce(x)

    for wide, *narrow in kccl.run_threads(main, 3):
        assert wide == 1 + 2**-23 and narrow == [1, 1, 1]


def test_every_other_byte_of_bool_is_true():
    def main(comm):
        x = np.array([0, 2, 4, 0, 255], np.uint8) if comm.rank else np.array([0, 1, 0, 2, 3], "u1")
        return [comm.all_reduce(x.view(bool).copy(), op=op).view("u1").tolist() for op in BITS]

    BITS = ops_of(kccl.bool_)
    either, both, differ = [0, 1, 1, 1, 1], [0, 1, 0, 0, 1], [0, 0, 1, 1, 0]
    want = {"sum": either, "max": either, "bor": either, "bxor": differ}
    for found in kccl.run_threads(main, 2):
        assert found == [want.get(op, both) for op in BITS]


# The host's kernels and the simulator's are the same text, so the simulator runs some of each kind.
SIMULATED = {
    "float8_e4m3fn": "avg",
    "bool": "sum",
    "complex64": "avg",
    "float8_e5m2": "max",
    "int8": "min",
    "uint16": "prod",
    "uint64": "bxor",
    "complex128": "prod",
}


@pytest.mark.long
@pytest.mark.parametrize("name", long_after(3, SIMULATED))
def test_on_the_simulator(name):
    algorithms = ["all_reduce_one_shot_ll16"]
    if name in (*oracle.SMALL_FLOATS, *oracle.COMPLEX):
        algorithms += ["all_reduce_one_shot_sentinel"]
    inputs = [x[:333].copy() for x in every_pair(name, 3)]
    check(inputs, (SIMULATED[name],), backend="sim", algorithms=algorithms)


@pytest.mark.long
@pytest.mark.parametrize("name", long_after(1, ["float8_e5m2", "complex128"]))
def test_pushes_on_the_simulator(name):
    algorithms = ["all_reduce_two_shot_push_simple", "all_reduce_two_shot_sentinel"]
    inputs = [x[:333].copy() for x in every_pair(name, 2)]
    check(inputs, (SIMULATED[name],), backend="sim", algorithms=algorithms)


# ---- What is refused ---------------------------------------------------------------------------

REFUSED = {
    ("int32", "avg"): "op is 'avg' and x has dtype int32, must be a float or a complex type",
    ("bool", "avg"): "must be a float or a complex type",
    ("float32", "band"): "op is 'band' and x has dtype float32, must be an integer type or bool",
    ("float8_e5m2", "bxor"): "must be an integer type or bool",
    ("complex64", "bor"): "must be an integer type or bool",
    ("complex64", "min"): "must be a real type, because complex numbers have no order",
    ("complex128", "max"): "must be a real type",
    ("float32", "xor"): "op is 'xor', must be one of sum, prod, min, max, avg, band, bor, bxor",
    ("S4", "sum"): r"x: dtype is \|S4, must be one of float32, .* take every type",
    ("U1", "sum"): "x: dtype is <U1, must be one of float32, ",
    (">f4", "sum"): "x: dtype is >f4, must have the machine's byte order, because",
    (">M8[s]", "sum"): r"x: dtype is >M8\[s\], must be one of float32, ",
    ("float8_e8m0fnu", "sum"): "x: dtype is float8_e8m0fnu, must be one of",
}


@pytest.mark.parametrize(("name", "op"), REFUSED)
def test_an_operator_that_a_type_does_not_take(name, op):
    dtype = np.dtype(getattr(ml_dtypes, name) if name.startswith("float8") else name)
    with kccl.init() as comm:
        for call in (comm.all_reduce, comm.reduce_scatter):
            with pytest.raises(kccl.InvalidArgument, match=REFUSED[name, op]):
                call(np.zeros(4, dtype), op=op)


def test_arrays_of_ctypes_in_the_other_byte_order():
    is_little = sys.byteorder == "little"
    swapped = ctypes.c_float.__ctype_be__ if is_little else ctypes.c_float.__ctype_le__
    wanted = "x: dtype is buffer format '[<>]f', must have the machine's byte order"
    with kccl.init() as comm, pytest.raises(kccl.InvalidArgument, match=wanted):
        comm.all_reduce((swapped * 4)())


# all_reduce and barrier have sentences of their own.
@pytest.mark.parametrize("name", sorted({*collectives.NAMES} - {"all_reduce", "barrier"}))
def test_docstrings_say_which_types_a_call_takes(name):
    with kccl.init() as comm:
        told = " ".join(inspect.getdoc(type(getattr(comm, name))).split())
    reduces = "op: As in all_reduce." in told
    assert reduces == ("op='sum'" in told)
    assert ("of a type that all_reduce takes" in told) == reduces
    assert ("of any type without Python objects" in told) == (not reduces)


def test_every_type_takes_the_operators_of_its_kind():
    kinds = {each.kind for each in dtypes.ALL}
    assert kinds == {"float", "signed", "unsigned", "bool", "complex"}
    assert {op for each in dtypes.ALL for op in ops_of(each)} == set(OPS)


# ---- Moved bytes -------------------------------------------------------------------------------

MOVED = {
    "structure": np.array([(1, 2.5), (3, -0.0)], [("a", "i2"), ("b", "f8")]),
    "text": np.array([b"ab", b"cde"], "S3"),
    "swapped": np.array([1.5, 2], ">f4"),
    "dates": np.array(["2026-01-02", "2026-01-03"], "M8[D]"),
    "float8_e8m0fnu": np.array([1, 2, 4], np.float32).astype(ml_dtypes.float8_e8m0fnu),
    "float8_e4m3b11fnuz": np.array([1, 2, 4], np.float32).astype(ml_dtypes.float8_e4m3b11fnuz),
    "void": np.arange(15, dtype=np.uint8).view("V5"),
    "long double": np.array([1, 2], np.longdouble),
    "bool": np.array([True, False]),
    "complex128": np.array([1 + 2j, 3]),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("backend", ["host", "sim"])
def test_types_that_are_only_moved(name, backend):
    x = MOVED[name]

    def main(comm):
        mine = np.roll(x, comm.rank)
        for _ in range(2):
            # The second call is one that C may know.
            everyone = comm.all_gather(mine)
            assert everyone.dtype == x.dtype and everyone.shape == (2, x.size)
            assert [row.tobytes() for row in everyone] == [np.roll(x, k).tobytes() for k in (0, 1)]
            copied = comm.broadcast(mine.copy(), 1)
            assert copied.tobytes() == np.roll(x, 1).tobytes()
        window = comm.window(64 + x.nbytes)
        comm.put(mine, 1 - comm.rank, window, 64)
        comm.barrier()
        found = np.zeros_like(x)
        comm.get(found, comm.rank, window, 64)
        assert found.tobytes() == np.roll(x, 1 - comm.rank).tobytes()
        comm.barrier()

    kccl.run_threads(main, 2, backend=backend)


def test_python_objects_are_not_moved():
    x = np.array([{}, []], object)
    with (
        kccl.init() as comm,
        pytest.raises(kccl.InvalidArgument, match="x: dtype is object, must have no Python objec"),
    ):
        comm.all_gather(x)
