"""Makes inputs whose exact result is known, and computes this result with NumPy.

An input depends on seed, rank and index, so that a wrong peer, a stale buffer and an index error
are all noticed. Values are chosen so that the result is exact in the element type in any order of
accumulation. So results are compared by bits. Values of longer messages repeat after a period. The
period is prime, so that no slice, round or chunk is a multiple of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .problem import Array, Problem

# The largest magnitude up to which a type represents every integer: 2 to its significant bits.
_EXACT_INTEGERS = {
    "float64": 1 << 53,
    "float32": 1 << 24,
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    "float8_e4m3fn": 1 << 4,
    "float8_e4m3": 1 << 4,
    "float8_e4m3fnuz": 1 << 4,
    "float8_e5m2": 1 << 3,
    "float8_e5m2fnuz": 1 << 3,
}

_PERIOD = 1_000_003
_PIECE = 1 << 18


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Returns whether the type is an integer or bool, whose arithmetic wraps and is exact."""
    return dtype.kind in "iub"


def make_input(problem: Problem, rank: int, seed: int) -> Array:
    """Returns a rank's input for one check: `problem.count` elements of the problem's type."""
    return _repeated(problem, _one_period(_short(problem), rank, seed))


def _one_period(problem: Problem, rank: int, seed: int) -> Array:
    dtype = problem.np_dtype
    assert dtype is not None, "a collective without data has no input"
    rng = np.random.default_rng((seed, rank))
    if dtype.kind == "b":
        return rng.integers(0, 2, problem.count).astype(dtype)
    if is_integer(dtype):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, problem.count, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        return _complex_input(problem, rank, seed)
    exact = _EXACT_INTEGERS[dtype.name]
    if problem.op == "prod":
        powers = rng.integers(-1, 2, problem.count)
        signed: Array = np.exp2(powers) * rng.choice((-1, 1), problem.count)
        return signed.astype(dtype)
    if problem.op == "avg":
        return _average_input(problem, rank, seed, exact // 2).astype(dtype)
    # A sum is exact in every order if world_size times the largest value is at most `exact`.
    largest = min(exact // problem.world_size if problem.op == "sum" else exact, 1 << 20)
    largest = max(largest, 1)
    return rng.integers(-largest, largest, problem.count, endpoint=True).astype(dtype)


def _complex_input(problem: Problem, rank: int, seed: int) -> Array:
    """Returns complex numbers whose parts are two inputs of floats; for products 1, -1, i or -i."""
    dtype = problem.np_dtype
    assert dtype is not None
    if problem.op == "prod":
        rng = np.random.default_rng((seed, rank))
        return rng.choice(np.array([1, -1, 1j, -1j], dtype), problem.count)
    part = np.dtype(np.float32 if dtype.name == "complex64" else np.float64)
    one, other = (
        _one_period(replace(problem, np_dtype=part, dtype=part.name), rank, 2 * seed + k)
        for k in (0, 1)
    )
    result: Array = (one + 1j * other).astype(dtype)
    return result


def _average_input(problem: Problem, rank: int, seed: int, largest: int) -> Array:
    """Returns values that are equal on all ranks, plus an offset on this rank. Rank
    world_size - 1 - `rank` has the same offset subtracted. So the average is the shared values,
    exactly and at any world size.
    """
    half = max(largest // 2, 1)
    shared = np.random.default_rng(seed).integers(-half, half, problem.count, endpoint=True)
    mirror = problem.world_size - 1 - rank
    if rank == mirror:
        return shared
    pair = np.random.default_rng((seed, min(rank, mirror), 1))
    offset = pair.integers(1, half, problem.count, endpoint=True)
    return shared + offset if rank < mirror else shared - offset


def reduced(problem: Problem, seed: int, num_terms: int = 0) -> Array:
    """Returns the reduction of the inputs of `seed` of the first `num_terms` ranks; 0: of all."""
    return _repeated(
        problem, _one_period_reduced(_short(problem), seed, num_terms or problem.world_size)
    )


def _one_period_reduced(problem: Problem, seed: int, num_terms: int) -> Array:
    dtype = problem.np_dtype
    assert dtype is not None, "a collective without data has no result"
    wide = dtype if is_integer(dtype) else np.dtype(np.complex128 if dtype.kind == "c" else "f8")
    steps = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    step = steps[problem.op or "sum"]
    total = _one_period(problem, 0, seed).astype(wide)
    for rank in range(1, num_terms):
        # NumPy's add of bool is "or", as is KCCL's sum of bool.
        total = step(total, _one_period(problem, rank, seed).astype(wide))
    if problem.op == "avg":
        total = total / num_terms
    return total.astype(dtype)


def _short(problem: Problem) -> Problem:
    return replace(problem, count=min(problem.count, _PERIOD))


def _repeated(problem: Problem, values: Array) -> Array:
    return np.resize(values, problem.count)


def count_wrong(result: Array, expected: Array) -> int:
    """Returns the number of elements whose bits differ. Of complex numbers, the real and the
    imaginary part are counted separately. If shape or type differ, all elements count.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(result.size, expected.size, 1)
    parts = 2 if expected.dtype.kind == "c" else 1
    bits = np.dtype(f"u{expected.itemsize // parts}")
    found, wanted = result.view(bits), expected.view(bits)
    # Compares in pieces, which stay in the cache, because messages may be long.
    pieces = (slice(begin, begin + _PIECE) for begin in range(0, found.size, _PIECE))
    return sum(int(np.count_nonzero(found[piece] != wanted[piece])) for piece in pieces)
