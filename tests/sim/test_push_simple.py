"""Collectives by push: in several blocks, in several rounds, on arrays at any address, and in the
form that is compiled for a number of ranks, as GPUs run it.
"""

import numpy as np
import oracle
import pytest
from collectives import reduce_scatter
from long import long_after
from sim_machine import BROADCAST_PUSH, GATHER_PUSH, PUSH, SCATTER_PUSH
from worlds import Simulation, World

from kccl.backends.settings import Settings

BLOCKS = 3
# Short staging: a block's slice of a long message takes several rounds, that of a short message is
# less than a line.
SETTINGS = Settings(
    num_channels=1, blocks_per_channel=BLOCKS, packet_bytes=64, staging_bytes=2048, exchange_bytes=0
)
# (elements, bytes that an array begins behind a word)
COUNTS = ((1, 3), (37, 0), (512, 3), (1500, 0), (1500, 5))
# Longer staging: a thread has several lines of a part. It copies some at once, in several turns.
WIDE = Settings(num_channels=1, packet_bytes=64, staging_bytes=8192, exchange_bytes=0)
MANY = (4000, 4003)


@pytest.fixture(params=long_after(1, [3, 2, 8]))
def world(request):
    with World(request.param, Simulation(ends_when_stuck=True), SETTINGS) as world:
        yield world


@pytest.fixture(params=long_after(1, [2, 4]))
def wide_world(request):
    """One block of one warp, and kernels that are compiled for this number of ranks."""
    with World(request.param, Simulation(ends_when_stuck=True), WIDE) as world:
        yield world


def shifted(array, shift):
    """A copy that begins `shift` bytes behind a word."""
    memory = np.zeros(array.nbytes + 16, np.uint8)
    memory[shift : shift + array.nbytes] = array.view(np.uint8)
    return memory[shift : shift + array.nbytes]


def run(world, kernel, inputs, outputs, grid=BLOCKS, block=64, **fields):
    """Makes the call twice on each rank: the second call uses the staging again."""
    program = [
        [
            world.call(rank, kernel, input=x, output=y, grid=grid, block=block, **fields)
            for _ in range(2)
        ]
        for rank, (x, y) in enumerate(zip(inputs, outputs, strict=True))
    ]
    report = world.run(program, seed=len(inputs))
    assert not report.findings, report.findings[0]
    assert set(report.statuses) == {0}


@pytest.mark.parametrize(("count", "shift"), COUNTS)
def test_all_gather(world, count, shift):
    ranks = range(world.world_size)
    inputs = [shifted(oracle.exact("int32", "sum", count, r, 1), shift) for r in ranks]
    outputs = [np.zeros(world.world_size * 4 * count, np.uint8) for _ in ranks]
    run(world, GATHER_PUSH, inputs, outputs, count=4 * count)
    for output in outputs:
        assert (output == np.concatenate(inputs)).all()


@pytest.mark.parametrize(("count", "shift"), COUNTS)
def test_reduce_scatter(world, count, shift):
    dtype, shift = ("bfloat16", 2) if shift else ("float32", 0)
    ranks = range(world.world_size)
    inputs = [oracle.exact(dtype, "sum", count * world.world_size, r, 2) for r in ranks]
    outputs = [np.zeros(inputs[0].itemsize * count, np.uint8) for _ in ranks]
    given = [shifted(x, shift) for x in inputs]
    run(world, SCATTER_PUSH, given, outputs, count=count, dtype=dtype)
    for rank, output in enumerate(outputs):
        want = reduce_scatter.want(inputs, rank, op="sum")
        oracle.assert_same(output.view(want.dtype), want, rank)


@pytest.mark.parametrize(("count", "shift"), COUNTS)
def test_broadcast(world, count, shift):
    root = world.world_size - 1
    sent = oracle.exact("int32", "sum", count, root, 3).view(np.uint8)
    arrays = [shifted(sent if r == root else 0 * sent, shift) for r in range(world.world_size)]
    run(world, BROADCAST_PUSH, arrays, arrays, count=sent.size, peer=root)
    for array in arrays:
        assert (array == sent).all()


ONE_WARP = {"grid": 1, "block": 32, "unrolls": True}


@pytest.mark.parametrize("count", MANY)
def test_all_reduce_in_the_form_of_a_gpu(wide_world, count):
    ranks = range(wide_world.world_size)
    inputs = [oracle.exact("bfloat16", "sum", count, r, 4) for r in ranks]
    outputs = [np.zeros_like(x) for x in inputs]
    run(wide_world, PUSH, inputs, outputs, count=count, dtype="bfloat16", **ONE_WARP)
    want = oracle.all_reduce(inputs, "sum")
    for rank, output in enumerate(outputs):
        oracle.assert_same(output, want, rank)


@pytest.mark.parametrize("count", MANY)
def test_reduce_scatter_in_the_form_of_a_gpu(wide_world, count):
    ranks = range(wide_world.world_size)
    inputs = [oracle.exact("float32", "sum", count * len(ranks), r, 5) for r in ranks]
    outputs = [np.zeros(count, np.float32) for _ in ranks]
    run(wide_world, SCATTER_PUSH, inputs, outputs, count=count, **ONE_WARP)
    for rank, output in enumerate(outputs):
        oracle.assert_same(output, reduce_scatter.want(inputs, rank, op="sum"), rank)


@pytest.mark.parametrize("count", MANY)
def test_all_gather_in_the_form_of_a_gpu(wide_world, count):
    ranks = range(wide_world.world_size)
    inputs = [oracle.exact("int32", "sum", count, r, 6) for r in ranks]
    outputs = [np.zeros(len(ranks) * count, np.int32) for _ in ranks]
    run(wide_world, GATHER_PUSH, inputs, outputs, count=4 * count, **ONE_WARP)
    for output in outputs:
        assert (output == np.concatenate(inputs)).all()


@pytest.mark.parametrize(("count", "root"), list(zip(MANY, (0, 1), strict=True)))
def test_broadcast_in_the_form_of_a_gpu(wide_world, count, root):
    ranks = range(wide_world.world_size)
    sent = oracle.exact("int32", "sum", 4 * count, root, 7)
    arrays = [sent.copy() if r == root else 0 * sent for r in ranks]
    run(wide_world, BROADCAST_PUSH, arrays, arrays, count=sent.nbytes, peer=root, **ONE_WARP)
    for array in arrays:
        assert (array == sent).all()
