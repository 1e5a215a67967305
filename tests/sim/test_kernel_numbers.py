"""Numbers as arguments of a user's kernel: they become what the parameter is, or are refused."""

import numpy as np
import pytest

import kccl
from kccl.base import scalars

NUMBERS = """
#include <kccl/kccl.cuh>

template <class T>
KCCL_KERNEL void keep(T* out, T number) {
    if (kccl::leads(kccl::block())) *out = number;
}
"""
INTEGERS = {f"{sign}int{bits}_t": (sign, bits) for sign in ("", "u") for bits in (8, 16, 32, 64)}


@pytest.fixture(scope="module")
def numbers():
    return kccl.compile(NUMBERS, [f"keep<{kind}>" for kind in (*INTEGERS, "bool", "float")])


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_become_what_the_parameter_is(numbers, kind):
    """Python's and NumPy's integers of any size fit an integer parameter of any size."""
    sign, bits = INTEGERS[kind]
    low = 0 if sign else -(2 ** (bits - 1))
    high = 2 ** (bits - (0 if sign else 1)) - 1
    kernel = numbers.kernel(f"keep<{kind}>")
    out = np.zeros(1, f"{sign}int{bits}")

    def main(comm):
        wide = np.uint64 if sign else np.int64
        for value in (low, high, 1, True, wide(high), np.int8(7), wide(low)):
            out[0] = 3
            kernel(comm, out, value)
            assert out[0] == value
        for value in (low - 1, high + 1, -(2**70)):
            with pytest.raises(
                kccl.InvalidArgument,
                match=f"argument 1 is {value}, must fit {bits} bits: {low} to {high}",
            ):
                kernel(comm, out, value)
        with pytest.raises(kccl.InvalidArgument, match=r"argument 1 is 1\.5, must be an integer"):
            kernel(comm, out, 1.5)
        assert out[0] == low

    kccl.run_threads(main, 1, backend="sim")


def test_floats_and_bools_become_what_the_parameter_is(numbers):
    single, flag = np.zeros(1, np.float32), np.zeros(1, bool)

    def main(comm):
        for value, kept in (
            (0.1, np.float32(0.1)),
            (3, 3),
            (-(2**30), -(2.0**30)),
            (np.int8(4), 4),
        ):
            numbers.kernel("keep<float>")(comm, single, value)
            assert single[0] == kept
        for value, why in ((1e39, "at most 3.40282347e"), (2**24 + 1, "does not hold exactly")):
            with pytest.raises(kccl.InvalidArgument, match=f"argument 1 is .*{why}"):
                numbers.kernel("keep<float>")(comm, single, value)
        for value in (1, True, np.int64(1)):
            flag[0] = False
            numbers.kernel("keep<bool>")(comm, flag, value)
            assert flag[0]
        with pytest.raises(kccl.InvalidArgument, match="argument 1 is 2, must fit 8 bits: 0 to 1"):
            numbers.kernel("keep<bool>")(comm, flag, 2)

    kccl.run_threads(main, 1, backend="sim")


@pytest.mark.parametrize(
    ("value", "num_bytes", "data"),
    [
        (-1, 4, b"\xff" * 4),
        (2**32 - 1, 4, b"\xff" * 4),
        (-(2**31), 4, b"\0\0\0\x80"),
        (5, 2, b"\5\0"),
        (True, 1, b"\1"),
        (0.5, 4, np.float32(0.5).tobytes()),
        (0.1, 8, np.float64(0.1).tobytes()),
        (1, 3, None),
        (0.5, 2, None),
    ],
)
def test_a_gpus_parameters_have_only_a_size(value, num_bytes, data):
    assert scalars.scalar_bytes(value, "argument 0", num_bytes, "?") == data
    if data is not None and isinstance(value, int):
        with pytest.raises(kccl.InvalidArgument, match=f"must fit {8 * num_bytes} bits: -"):
            scalars.scalar_bytes(2 ** (8 * num_bytes), "argument 0", num_bytes, "?")
