"""The right results, in NumPy: one rank's result, bit by bit, from all ranks' inputs.

Inputs are accumulated in the order of ranks 0, 1, 2, ..., and the sum is rounded once.
"""

import ml_dtypes
import numpy as np

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
DTYPES = (*FLOATS, *INTEGERS)
OPS = ("sum", "prod", "min", "max", "avg")

_ACCUMULATORS = {"float64": "float64", "int32": "uint32", "int64": "uint64"}
_CANONICAL_NAN = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def ops_of(name):
    return OPS if name in FLOATS else OPS[:-1]


def bits(array):
    """The elements as unsigned integers, so that NaN equals NaN and -0 differs from +0."""
    return array.view(f"uint{8 * array.dtype.itemsize}")


def all_reduce(inputs, op):
    """The reduction of the ranks' arrays, which have one shape and dtype."""
    name = inputs[0].dtype.name
    if name in INTEGERS and op in ("min", "max"):
        return np.minimum.reduce(inputs) if op == "min" else np.maximum.reduce(inputs)
    accumulator = _ACCUMULATORS.get(name, "float32")
    with np.errstate(all="ignore"):
        terms = [x.astype(accumulator) for x in inputs]
        result = terms[0]
        for term in terms[1:]:
            result = _APPLY[op](result, term)
        if op == "avg":
            result = result / result.dtype.type(len(inputs))
        rounded = result.astype(inputs[0].dtype)
    if name in FLOATS:
        bits(rounded)[np.isnan(result)] = _CANONICAL_NAN[name]
    return rounded


def _extreme(a, b, of_numbers, zero_is_negative):
    zeros = (a == 0) & (b == 0)
    zero = np.where(zero_is_negative(np.signbit(a), np.signbit(b)), a.dtype.type(-0.0), 0)
    # NumPy's minimum and maximum give NaN when either is NaN.
    return np.where(zeros, zero, of_numbers(a, b)).astype(a.dtype)


_APPLY = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": lambda a, b: _extreme(a, b, np.minimum, np.logical_or),
    "max": lambda a, b: _extreme(a, b, np.maximum, np.logical_and),
}


def exact(name, op, count, rank, salt=0):
    """`rank`'s input: differs by rank, index and salt; sums and products of 8 ranks are exact."""
    mixed = np.arange(count, dtype=np.uint64) * 2654435761 + (rank * 40503 + salt * 69069 + 12345)
    mixed ^= mixed >> 15
    mixed *= 2246822519
    mixed = (mixed >> 13) % (1 << 20)
    if op == "prod":
        factors = (1, 2, -1, -2, 1, 4) if name in INTEGERS else (1, 2, -1, -2, 0.5, -0.25)
        return np.array(factors)[mixed % len(factors)].astype(numpy_dtype(name))
    return (mixed.astype(np.int64) % 31 - 15).astype(numpy_dtype(name))


def any_bits(name, count, rng):
    """Elements of every kind: all bit patterns are equally likely, special values are frequent."""
    dtype = numpy_dtype(name)
    raw = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if name in FLOATS:
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, *_edges(dtype)]
        chosen = rng.random(count) < 0.3
        raw[chosen] = rng.choice(np.array(special, np.float64), chosen.sum()).astype(dtype)
    return raw


def random_floats(name, count, rng):
    """Floats whose sums depend on the order, some subnormal or infinite; no NaN among them."""
    dtype = numpy_dtype(name)
    x = rng.standard_normal(count) * np.exp2(rng.integers(-6, 7, count))
    tiny = rng.random(count) < 0.2
    x[tiny] = rng.integers(-9, 10, tiny.sum()) * float(ml_dtypes.finfo(dtype).smallest_subnormal)
    # Every fifth element is large or small. Large values may cancel, and small ones are lost when
    # added to large ones. So the order of the ranks decides.
    great = {"float16": 2.0**14, "float64": 2.0**60}.get(name, 2.0**40)
    x[::5] = rng.choice([great, -great, 2.0**-11, 3 * 2.0**-12], x[::5].size)
    infinite = rng.random(count) < 0.02
    x[infinite] = rng.choice([np.inf, -np.inf], infinite.sum())
    return x.astype(dtype)


def _edges(dtype):
    info = ml_dtypes.finfo(dtype)
    edges = (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)
    return [sign * float(edge) for edge in edges for sign in (1, -1)]


def assert_same(got, want, *what):
    """Fails with the first element whose bits differ."""
    assert got.dtype == want.dtype and got.shape == want.shape, what
    different = np.flatnonzero(bits(got) != bits(want))
    if different.size:
        first = different[0]
        raise AssertionError(
            f"{what}: {different.size} of {got.size} elements differ; [{first}] is {got[first]} "
            f"({bits(got)[first]:#x}), must be {want[first]} ({bits(want)[first]:#x})"
        )
