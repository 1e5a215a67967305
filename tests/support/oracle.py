"""The right results, in NumPy: one rank's result, bit by bit, from all ranks' inputs.

Inputs are accumulated in the order of ranks 0, 1, 2, ..., and the sum is rounded once.
"""

import ml_dtypes
import numpy as np

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
DTYPES = (*FLOATS, *INTEGERS)
OPS = ("sum", "prod", "min", "max", "avg")

SMALL_FLOATS = ("float8_e4m3fn", "float8_e5m2")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
EVERY_DTYPE = (*FLOATS, *SMALL_FLOATS, *SIGNED, *UNSIGNED, "bool", *COMPLEX)
BIT_OPS = ("band", "bor", "bxor")

_CANONICAL_NAN = {
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}


def numpy_dtype(name):
    is_from_ml = name == "bfloat16" or name in SMALL_FLOATS
    return np.dtype(getattr(ml_dtypes, name) if is_from_ml else name)


def ops_of(name):
    """The operators that take an element type. Of the six common types, without those on bits."""
    if name in (*FLOATS, *SMALL_FLOATS):
        return OPS
    if name in COMPLEX:
        return ("sum", "prod", "avg")
    return OPS[:-1] if name in INTEGERS else (*OPS[:-1], *BIT_OPS)


def bits(array):
    """The elements as unsigned integers, so that NaN equals NaN and -0 differs from +0.

    A complex number is two of them.
    """
    itemsize = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    return array.view(f"uint{8 * itemsize}")


def all_reduce(inputs, op):
    """The reduction of the ranks' arrays, which have one shape and dtype."""
    name = inputs[0].dtype.name
    with np.errstate(all="ignore"):
        if name in COMPLEX:
            return _of_complex(inputs, op)
        if name in (*SIGNED, *UNSIGNED, "bool"):
            return _of_integers(inputs, op)
        return _rounded(_of_floats(inputs, op), inputs[0].dtype)


def premul_sum(inputs, factors):
    """The sum of the ranks' products with a number each."""
    dtype = inputs[0].dtype
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            unsigned = np.dtype(f"uint{8 * dtype.itemsize}").type
            modulus = 1 << (8 * dtype.itemsize)
            terms = [
                x.view(unsigned) * unsigned(int(factor) % modulus)
                for x, factor in zip(inputs, factors, strict=True)
            ]
            return all_reduce(terms, "sum").view(dtype)
        is_wide = dtype.name in ("float64", "complex128")
        real = np.dtype("float64" if is_wide else "float32").type
        if dtype.kind == "c":
            terms = []
            for x, factor in zip(inputs, factors, strict=True):
                term = np.empty_like(x)
                term.real, term.imag = x.real * real(factor), x.imag * real(factor)
                terms.append(term)
            return all_reduce(terms, "sum")
        pairs = zip(inputs, factors, strict=True)
        terms = [x.astype(real) * real(factor) for x, factor in pairs]
        return _rounded(_of_floats(terms, "sum"), dtype)


def _of_integers(inputs, op):
    dtype = inputs[0].dtype
    if dtype.name == "bool":
        # NumPy has no sum and product of bool that stay bool.
        op = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}.get(op, op)
    elif op in ("min", "max"):
        return np.minimum.reduce(inputs) if op == "min" else np.maximum.reduce(inputs)
    else:
        # Unsigned, because those wrap by definition.
        inputs = [x.view(f"uint{8 * dtype.itemsize}") for x in inputs]
    result = inputs[0]
    for term in inputs[1:]:
        result = _APPLY[op](result, term)
    return result.view(dtype)


def _of_floats(inputs, op):
    """The result before it is rounded to the type of the elements."""
    accumulator = "float64" if inputs[0].dtype == np.float64 else "float32"
    terms = [x.astype(accumulator) for x in inputs]
    result = terms[0]
    for term in terms[1:]:
        result = _APPLY[op](result, term)
    return result / result.dtype.type(len(inputs)) if op == "avg" else result


def _rounded(result, dtype):
    rounded = result.astype(dtype)
    # ml_dtypes rounds what is too large for float8_e4m3fn to NaN.
    bits(rounded)[np.isnan(rounded)] = _CANONICAL_NAN[dtype.name]
    return rounded


def _of_complex(inputs, op):
    real, imag = [x.real.copy() for x in inputs], [x.imag.copy() for x in inputs]
    if op == "prod":
        re, im = real[0], imag[0]
        for a, b in zip(real[1:], imag[1:], strict=True):
            re, im = re * a - im * b, re * b + im * a
    else:
        re, im = _of_floats(real, op), _of_floats(imag, op)
    out = np.empty_like(inputs[0])
    out.real, out.imag = (_rounded(part, part.dtype) for part in (re, im))
    return out


def _extreme(a, b, of_numbers, zero_is_negative):
    zeros = (a == 0) & (b == 0)
    zero = np.where(zero_is_negative(np.signbit(a), np.signbit(b)), a.dtype.type(-0.0), 0)
    # NumPy's minimum and maximum give NaN when either is NaN.
    return np.where(zeros, zero, of_numbers(a, b)).astype(a.dtype)


_APPLY = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
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


def assert_result(got, want, *what):
    """Fails unless a collective's result is right. `want` has one dimension; None: no result."""
    if want is None:
        assert got is None, what
    else:
        assert_same(got.reshape(-1), want, *what)


def assert_same(got, want, *what):
    """Fails with the first element whose bits differ."""
    assert got.dtype == want.dtype and got.shape == want.shape, what
    different = np.flatnonzero(bits(got) != bits(want))
    if different.size:
        first = different[0]
        raise AssertionError(
            f"{what}: {different.size} of {bits(got).size} words differ; [{first}] is "
            f"{bits(got)[first]:#x}, must be {bits(want)[first]:#x}"
        )
