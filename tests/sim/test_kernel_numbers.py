"""Numbers as arguments of a user's kernel: they become what the parameter is, or are refused."""

import ctypes

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
    ("kind", "value", "kept"),
    [
        ("int32_t", np.float32(1), 1),
        ("int64_t", np.float64(-2), -2),
        ("uint8_t", np.float16(255), 255),
        ("int32_t", 3.0, 3),
        ("int32_t", np.bool_(True), 1),
        ("int32_t", ctypes.c_float(7), 7),
        ("float", np.int32(3), 3),
        ("float", np.float16(1.5), 1.5),
        ("float", np.bool_(True), 1),
        ("float", ctypes.c_int32(5), 5),
        ("bool", np.uint8(1), 1),
        ("bool", np.bool_(True), 1),
    ],
)
def test_a_number_of_another_kind_keeps_its_value(numbers, kind, value, kept):
    out = np.zeros(1, {"float": "float32"}.get(kind, kind.removesuffix("_t")))
    kernel = numbers.kernel(f"keep<{kind}>")
    kccl.run_threads(lambda comm: kernel(comm, out, value), 1, backend="sim")
    assert out[0] == kept


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("int32_t", np.float32(1.5), r"is 1\.5, must be an integer of -2147483648 to 2147483647"),
        ("int32_t", np.float32(np.inf), "is inf, must be an integer of"),
        ("int32_t", np.float32(2**31), "is 2147483648, must fit 32 bits: -2147483648 to"),
        ("uint32_t", np.int32(-1), "is -1, must fit 32 bits: 0 to 4294967295"),
        ("bool", np.uint8(2), "is 2, must fit 8 bits: 0 to 1"),
        ("float", np.int32(2**24 + 1), "is 16777217, which a float of 4 bytes does not hold"),
        ("int64_t", np.complex64(1), "must be a bool, an integer or a float of at most 64 bits"),
    ],
)
def test_a_number_that_would_change_is_refused(numbers, kind, value, message):
    out = np.full(1, 77, {"float": "float32"}.get(kind, kind.removesuffix("_t")))

    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match=f"^argument 1 .*{message}"):
            numbers.kernel(f"keep<{kind}>")(comm, out, value)

    before = out.copy()
    kccl.run_threads(main, 1, backend="sim")
    assert out[0] == before[0]


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
