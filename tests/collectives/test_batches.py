"""A sum has the same bits on every rank, by every algorithm, at every size and in every batch: rows
that are summed alone have the bits that they have among others.
"""

import numpy as np
import oracle
import pytest
from groups import algorithms_for, same
from long import long_after

import kccl

ROWS, WIDTH = 40, 1021
# First row and number of rows.
BATCHES = ((0, 1), (7, 1), (39, 1), (3, 2), (1, 13), (8, 32), (0, 40))


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    long_after(
        2, [(2, "bfloat16"), (9, "float32"), (3, "float32"), (8, "float64"), (5, "float16")]
    ),
)
def test_a_row_does_not_see_its_batch(world_size, dtype):
    """The numbers are such that another order of the sum would give other bits."""

    def main(comm):
        rng = np.random.default_rng(comm.rank)
        numbers = rng.standard_normal((ROWS, WIDTH)) * 10.0 ** rng.integers(-3, 3, (ROWS, WIDTH))
        x = numbers.astype(oracle.numpy_dtype(dtype))
        whole = comm.all_reduce(x.copy())
        for first, number in BATCHES:
            batch, wanted = x[first:][:number], whole[first:][:number]
            for algorithm in algorithms_for(comm, "all_reduce", dtype, batch.nbytes):
                same(comm.all_reduce(batch.copy(), algorithm=algorithm), wanted)
                op = comm.all_reduce.prepare(batch.copy(), algorithm=algorithm)
                same(op(), wanted)
            for algorithm in algorithms_for(comm, "reduce", dtype, batch.nbytes):
                found = comm.reduce(batch.copy(), 1, algorithm=algorithm)
                if comm.rank == 1:
                    same(found, wanted)
            tiled = np.concatenate([batch] * world_size)
            same(comm.reduce_scatter(tiled), wanted)
        # All ranks have them.
        assert (oracle.bits(comm.all_gather(whole)) == oracle.bits(whole)).all()
        return oracle.bits(whole), oracle.bits(x)

    found = kccl.run_threads(main, world_size, timeout=60)
    again = kccl.run_threads(main, world_size, timeout=60)
    assert (found[0][0] == again[0][0]).all()


def test_other_orders_would_give_other_bits():
    """So the test above can fail."""
    numbers = [np.random.default_rng(rank).standard_normal(1000).astype("f4") for rank in range(3)]
    forward, backward = sum(numbers), sum(numbers[::-1])
    assert (forward != backward).any()
