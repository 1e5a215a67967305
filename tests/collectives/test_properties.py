"""Random calls give the oracle's bits, whatever length, address, type, operator and algorithm."""

import numpy as np
import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import algorithms_for

import kccl
from kccl.plan.lookup import algorithms

CALLS = st.tuples(
    st.sampled_from(oracle.DTYPES),
    st.sampled_from(oracle.OPS),
    st.sampled_from(["", *algorithms("all_reduce")]),
    st.one_of(st.integers(0, 40), st.integers(0, 5000)),
    st.tuples(st.integers(0, 63), st.integers(0, 63)),
    st.booleans(),
    st.integers(0, 3),
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=12),
    world_size=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_reduce(calls, world_size, seed):
    rng = np.random.default_rng(seed)
    cases = []
    for dtype, op, algorithm, count, offsets, in_place, channel in calls:
        op = op if op in oracle.ops_of(dtype) else "sum"
        if algorithm not in algorithms_for("all_reduce", world_size, dtype):
            algorithm = ""
        inputs = [oracle.any_bits(dtype, count, rng) for _ in range(world_size)]
        want = oracle.all_reduce(inputs, op)
        keywords = {"op": op, "algorithm": algorithm, "channel": channel}
        cases.append((inputs, want, offsets, in_place, keywords))

    def main(comm):
        for inputs, want, offsets, in_place, keywords in cases:
            x, out = (place(inputs[comm.rank], offset + comm.rank) for offset in offsets)
            out = x if in_place else out
            assert comm.all_reduce(x, out=out, **keywords) is out
            oracle.assert_same(out, want, keywords, in_place, offsets, comm.rank)

    kccl.run_threads(main, world_size)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["", *algorithms_for("broadcast", 3, "bfloat16")]),
            st.integers(0, 5000),
            st.integers(0, 63),
            st.integers(0, 7),
        ),
        min_size=1,
        max_size=12,
    ),
    world_size=st.integers(1, 8),
)
def test_broadcast(calls, world_size):
    def main(comm):
        for number, (algorithm, count, offset, root) in enumerate(calls):
            root %= world_size
            want = oracle.any_bits("bfloat16", count, np.random.default_rng(number))
            x = place(want if comm.rank == root else np.zeros_like(want), offset + comm.rank)
            comm.broadcast(x, root, algorithm=algorithm)
            oracle.assert_same(x, want, algorithm, root, offset)

    kccl.run_threads(main, world_size)


def place(array, offset):
    """A copy of `array` that begins `offset` bytes into its memory."""
    memory = bytearray(offset) + array.tobytes()
    return np.frombuffer(memory, array.dtype, array.size, offset)
