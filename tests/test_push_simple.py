"""all_gather, reduce_scatter and broadcast by push: by several blocks, in several rounds, on arrays
that begin anywhere; and whom the planner keeps from them.
"""

import numpy as np
import oracle
import pytest
from sim_machine import BROADCAST_PUSH, GATHER_PUSH, SCATTER_PUSH

import kccl
from kccl import plan
from kccl.backends.common import Settings
from kccl.simulator import Simulation, World

BLOCKS = 3
# Parts of few lines: a long block's slice takes several rounds, a short one's less than a line.
SETTINGS = Settings(
    num_channels=1, blocks_per_channel=BLOCKS, packet_bytes=64, staging_bytes=2048, exchange_bytes=0
)
COUNTS = (1, 37, 512, 1500)


@pytest.fixture(params=[2, 3, 8])
def world(request):
    with World(request.param, Simulation(ends_when_stuck=True), SETTINGS) as world:
        yield world


def shifted(array, shift):
    """A copy that begins so many bytes behind a word."""
    memory = np.zeros(array.nbytes + 16, np.uint8)
    memory[shift : shift + array.nbytes] = array.view(np.uint8)
    return memory[shift : shift + array.nbytes]


def run(world, kernel, inputs, outputs, **fields):
    """One call on each rank; twice, because the second meets the staging of the first."""
    program = [
        [
            world.call(rank, kernel, input=x, output=y, grid=BLOCKS, block=64, **fields)
            for _ in range(2)
        ]
        for rank, (x, y) in enumerate(zip(inputs, outputs, strict=True))
    ]
    report = world.run(program, seed=len(inputs))
    assert not report.findings, report.findings[0]
    assert set(report.statuses) == {0}


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("count", COUNTS)
def test_all_gather(world, count, shift):
    ranks = range(world.world_size)
    inputs = [shifted(oracle.exact("int32", "sum", count, r, 1), shift) for r in ranks]
    outputs = [np.zeros(world.world_size * 4 * count, np.uint8) for _ in ranks]
    run(world, GATHER_PUSH, inputs, outputs, count=4 * count)
    for output in outputs:
        assert (output == np.concatenate(inputs)).all()


@pytest.mark.parametrize(("dtype", "shift"), [("float32", 0), ("bfloat16", 2)])
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_scatter(world, count, dtype, shift):
    ranks = range(world.world_size)
    inputs = [oracle.exact(dtype, "sum", count * world.world_size, r, 2) for r in ranks]
    outputs = [np.zeros(inputs[0].itemsize * count, np.uint8) for _ in ranks]
    given = [shifted(x, shift) for x in inputs]
    run(world, SCATTER_PUSH, given, outputs, count=count, dtype=dtype)
    for rank, output in enumerate(outputs):
        want = oracle.reduce_scatter(inputs, "sum", rank)
        oracle.assert_same(output.view(want.dtype), want, rank)


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_broadcast(world, count, shift):
    root = world.world_size - 1
    sent = oracle.exact("int32", "sum", count, root, 3).view(np.uint8)
    arrays = [shifted(sent if r == root else 0 * sent, shift) for r in range(world.world_size)]
    run(world, BROADCAST_PUSH, arrays, arrays, count=sent.size, peer=root)
    for array in arrays:
        assert (array == sent).all()


@pytest.mark.parametrize("name", [GATHER_PUSH, SCATTER_PUSH, BROADCAST_PUSH])
def test_why_not(name):
    (spec,) = (spec for spec in plan.SPECS if spec.name == name)

    def why_not(world_size, backend):
        return spec.why_not(plan.Request(spec.collective, 8, world_size, backend, kccl.float32))

    assert [why_not(2, backend) for backend in ("cuda", "sim")] == [None, None]
    assert "on the host peers pull" in why_not(2, "host")
    assert "nobody to push to" in why_not(1, "cuda")
