"""The kernels of `kccl topo --probe` as clang compiles them for gfx942, on the interpreter."""

from pathlib import Path

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_machine import Launch, Program
from gcn_world import World, compiled

from kccl.tools.gpu_probe import within

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
DIES = 8
BLOCKS = 11  # an odd number, and not as many on each die
TRIPS, WARMUP = 4, 1


def run(kernel, arguments, grid, seed=0):
    """arguments: arrays in the GPU's memory, and numbers of the kernel's own types."""
    world = World(1)
    program = Program(compiled(Path(within.SOURCE).read_text()))
    data, arrays = bytearray(), []
    for each in arguments:
        value = each
        if isinstance(each, np.ndarray):
            arrays.append(world.array(0, each))
            value = np.uint64(arrays[-1].ctypes.data)
        data += bytes(-len(data) % value.itemsize) + value.tobytes()
    symbol = program.symbol(f"_Z{len(kernel)}{kernel}")
    launch = Launch(0, program, symbol, bytes(data), grid=grid)
    report = world.run([launch], seed=seed)
    assert report.finding is None, report.finding
    return arrays


def check_places(places):
    """Blocks go to the dies in turn, and each has a unit to itself."""
    units, dies = places.reshape(-1, 2).T
    assert dies.tolist() == [block % DIES for block in range(BLOCKS)]
    assert units.tolist() == [block % DIES << 8 | block // DIES for block in range(BLOCKS)]


@pytest.mark.parametrize("seed", range(3))
def test_every_unit_plays_with_every_other(seed):
    outboxes = np.zeros(BLOCKS * within._OUTBOX_BYTES // 4, np.uint32)
    ticks, places = np.zeros((BLOCKS, BLOCKS), np.uint64), np.zeros(2 * BLOCKS, np.uint32)
    numbers = np.uint32(1), np.uint32(TRIPS), np.uint32(WARMUP), np.uint64(10**9)
    _, ticks, places = run("probe_units", [outboxes, *numbers, ticks, places], BLOCKS, seed)
    check_places(places)
    assert ((ticks == 0) == np.eye(BLOCKS, dtype=bool)).all()


def test_every_unit_loads_every_line():
    lines, words = 5, 1024
    data, ticks = np.zeros(lines * words, np.uint32), np.zeros((BLOCKS, lines), np.uint32)
    numbers = np.uint32(lines), np.uint32(words), np.uint32(2)
    places = np.zeros(2 * BLOCKS, np.uint32)
    _, ticks, places = run("probe_lines", [data, *numbers, ticks, places], BLOCKS)
    check_places(places)
    assert (ticks > 0).all()
