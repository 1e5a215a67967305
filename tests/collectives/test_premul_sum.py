"""premul_sum(): each rank's elements times its own number, summed in rank order, rounded once."""

import weakref
from functools import partial

import numpy as np
import oracle
import pytest

import kccl
from kccl.backends import host_memory
from kccl.plan.ops import PremulSum

DTYPES = [name for name in oracle.EVERY_DTYPE if name != "bool"]
SIMULATED = ["bfloat16", "int32", "complex64", "float64", "float8_e4m3fn"]
COUNT = 24  # a multiple of all world sizes here


def factors_of(dtype, world_size):
    if np.dtype(oracle.numpy_dtype(dtype)).kind in "iu":
        return [3, -5, 2.0, 7, 1 << 40, 0, -1, 11][:world_size]
    # Most are not exact in float32, so the bits show to which type a product is rounded.
    return [0.1, -1 / 3, 2, 1e-3, 0.75, -0.0, 1.1, 7][:world_size]


def inputs_of(dtype, world_size):
    """Ordinary numbers, and random bits between them."""
    rng = np.random.default_rng(world_size)
    dtype = oracle.numpy_dtype(dtype)
    inputs = rng.integers(0, 256, (world_size, COUNT * dtype.itemsize), np.uint8).view(dtype)
    with np.errstate(all="ignore"):
        inputs[:, ::2] = (rng.standard_normal((world_size, COUNT // 2)) * 50).astype(dtype)
    return list(inputs)


def same(found, wanted):
    return oracle.bits(np.ascontiguousarray(found)).tolist() == oracle.bits(wanted).tolist()


def check_calls(comm, dtype):
    """Every collective that reduces, in place and out of place, twice and prepared."""
    rank, world_size = comm.rank, comm.world_size
    inputs, factors = inputs_of(dtype, world_size), factors_of(dtype, world_size)
    wanted = oracle.premul_sum(inputs, factors)
    op = kccl.premul_sum(factors[rank])
    x, out = inputs[rank].copy(), np.zeros_like(wanted)
    assert comm.all_reduce(x, out=out, op=op) is out
    assert same(out, wanted) and same(x, inputs[rank])
    again = comm.all_reduce.prepare(x, op=op)
    assert same(again(), wanted)
    x[:] = inputs[rank]
    assert same(again(), wanted)
    for _ in range(2):  # the second time C makes the call
        x[:] = inputs[rank]
        assert comm.all_reduce(x, op=kccl.premul_sum(factors[rank])) is x
        assert same(x, wanted)
    part = COUNT // world_size
    own = slice(rank * part, (rank + 1) * part)
    assert same(comm.reduce_scatter(inputs[rank], op=op), wanted[own])
    x[:] = inputs[rank]
    comm.reduce_scatter(x, out=x[own], op=op)
    assert same(x[own], wanted[own])
    counts = [COUNT - world_size + 1, *[1] * (world_size - 1)]
    first = sum(counts[:rank])
    found = comm.reduce_scatter(inputs[rank], op=op, counts=counts)
    assert same(found, wanted[first : first + counts[rank]])
    root = world_size - 1
    x[:] = inputs[rank]
    result = comm.reduce(x, root, op=op)
    assert same(x, wanted if rank == root else inputs[rank])
    assert (result is x) == (rank == root)
    for exclusive in (False, True):
        x[:] = inputs[rank]
        comm.scan(x, op=op, exclusive=exclusive)
        terms = rank + 1 - exclusive
        partial = oracle.premul_sum(inputs[:terms], factors[:terms]) if terms else inputs[rank]
        assert same(x, partial)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_on_the_host(world_size):
    def main(comm):
        for dtype in DTYPES:
            check_calls(comm, dtype)

    kccl.run_threads(main, world_size)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "world_size"), list(zip(SIMULATED[:2], (3, 8), strict=True)))
def test_on_the_simulator(dtype, world_size):
    kccl.run_threads(partial(check_calls, dtype=dtype), world_size, backend="sim")


@pytest.mark.long
@pytest.mark.parametrize("dtype", SIMULATED[2:])
def test_other_types_on_the_simulator(dtype):
    kccl.run_threads(partial(check_calls, dtype=dtype), 2, backend="sim")


@pytest.mark.parametrize("nbytes", [40_000, 4_000_000])
def test_long_messages_of_floats_of_16_bits(nbytes):
    """They are planned by the bytes that travel, those of float32."""
    wanted = np.full(nbytes // 2, 3 * 0.5 - 1, oracle.numpy_dtype("bfloat16"))

    def main(comm):
        x = np.full_like(wanted, comm.rank * 2 + 1)
        op = kccl.premul_sum((-1.0, 0.5)[comm.rank])
        assert same(comm.all_reduce(x, op=op), wanted)
        plan = comm.all_reduce.prepare(x, op=op).plan
        return plan.request.nbytes, plan.request.dtype

    assert kccl.run_threads(main, 2) == [(2 * nbytes, kccl.float32)] * 2


def test_channels_have_memory_of_their_own():
    def main(comm):
        x = [np.full(5, value, np.float32) for value in (1, 10)]
        calls = [
            comm.all_reduce.prepare(each, op=kccl.premul_sum(2), channel=channel)
            for channel, each in enumerate(x)
        ]
        for call in calls:
            call()
        return [each[0] for each in x]

    assert kccl.run_threads(main, 2) == [[4, 40]] * 2


@pytest.mark.parametrize("ends", ["close", "close of a part", "shrink of a part"])
@pytest.mark.parametrize("world_size", [2, 9])
def test_memory_is_free_when_a_communicator_ends(world_size, ends, monkeypatch):
    """The communicator and its prepared call are still there. Steps of 9 ranks have memory too."""
    made = []

    def anonymous(nbytes):
        address, memory = host_memory_of(nbytes)
        made.append(weakref.ref(memory))
        return address, memory

    host_memory_of = host_memory.anonymous
    monkeypatch.setattr(host_memory, "anonymous", anonymous)

    def main(comm):
        used = comm if ends == "close" else comm.split(0)
        x = np.full(1000, 3, oracle.numpy_dtype("bfloat16"))
        op = used.all_reduce.prepare(x, op=kccl.premul_sum(0.5))
        assert op()[0] == 1.5 * world_size
        used.reduce_scatter(np.ones(100 * world_size, np.float32), op=kccl.premul_sum(2))
        comm.barrier()
        if ends == "shrink of a part":
            used.shrink().close()
        used.close()
        with pytest.raises(kccl.Error, match="closed"):
            op()
        return used, op

    kept = kccl.run_threads(main, world_size)
    assert made and kept and not any(each() for each in made)


def test_more_than_8_ranks():
    """Sums of whole numbers, because the order of a sum is that of the groups."""

    def main(comm):
        for dtype in ("float32", "bfloat16", "int16"):
            x = np.full(10, comm.rank, oracle.numpy_dtype(dtype))
            op = kccl.premul_sum(comm.rank % 3)
            total = sum(rank * (rank % 3) for rank in range(10))
            assert (comm.all_reduce(x.copy(), op=op) == total).all()
            assert (comm.reduce_scatter(x, op=op) == total).all()
            assert comm.rank != 4 or (comm.reduce(x.copy(), 4, op=op) == total).all()
            assert comm.rank == 4 or comm.reduce(x.copy(), 4, op=op) is None
            below = sum(rank * (rank % 3) for rank in range(comm.rank + 1))
            assert (comm.scan(x, op=op) == below).all()

    kccl.run_threads(main, 10)


def test_equal_numbers_are_one_op():
    """C knows a call's op by its identity."""
    assert kccl.premul_sum(0.5) is kccl.premul_sum(np.float32(0.5))
    assert kccl.premul_sum(2) is kccl.premul_sum(np.int8(2))
    zeros = kccl.premul_sum(0.0), kccl.premul_sum(-0.0), kccl.premul_sum(0)
    assert len(set(zeros)) == 3 and all(isinstance(each, PremulSum) for each in zeros)
    assert repr(zeros[1]) == "kccl.premul_sum(-0.0)"


class _TooLarge:
    """A number that no float holds."""

    def __float__(self):
        raise OverflowError


@pytest.mark.parametrize("factor", ["2", True, np.True_, None, 1j, 1 << 64, _TooLarge(), [1.0]])
def test_what_is_no_number(factor):
    with pytest.raises(kccl.InvalidArgument, match="must be"):
        kccl.premul_sum(factor)


@pytest.mark.parametrize(
    ("dtype", "factor", "reason"),
    [
        ("int32", 0.5, "the factor must be an integer, or x a float"),
        ("uint8", float("inf"), "the factor must be an integer, or x a float"),
        ("bool", 1, "must be a number's type"),
    ],
)
def test_numbers_that_a_type_does_not_take(dtype, factor, reason):
    with kccl.init() as comm:
        x = np.zeros(3, dtype)
        for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter, comm.scan):
            with pytest.raises(kccl.InvalidArgument, match=reason):
                call(x, op=kccl.premul_sum(factor))


def test_the_ranks_numbers_may_differ_where_calls_are_compared(monkeypatch):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        x = np.ones(3, np.float32)
        return comm.all_reduce(x, op=kccl.premul_sum(comm.rank + 1)).tolist()

    assert kccl.run_threads(main, 2) == [[3.0] * 3] * 2
