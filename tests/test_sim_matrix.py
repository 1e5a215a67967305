"""The simulator finds nothing: a share of the matrix, the largest machine, and all schedules of the
smallest.

The whole matrix takes hours: `make sim-soak`.
"""

import os
import resource
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import sim_matrix
from sim_matrix import CELLS, COLLECTIVES, SIZES, Task
from sim_programs import LL16, Machine, Script

# Of warp size, model and epoch bits: every pair of two of them, in half of the combinations.
PAIRS = {(32, "sm_90", 4), (32, "gfx942", 32), (64, "sm_90", 32), (64, "gfx942", 4)}


def share(collective, size):
    """The tasks of a row of the matrix, by what one run of them costs."""
    for cell in CELLS:
        if (cell.collective, cell.size) != (collective, size):
            continue
        is_in_pairs = (cell.warp_size, cell.model, cell.epoch_bits) in PAIRS
        is_first = (cell.warp_size, cell.model, cell.epoch_bits) == min(PAIRS)
        if size in ("0", "8", "odd"):
            num_seeds = 3 if cell.world_size < 4 else 1
            takes = cell.world_size < 8 or is_in_pairs
        elif size == "8K":
            num_seeds = 1
            takes = is_in_pairs and cell.world_size < 4 or is_first and cell.world_size == 4
            takes = takes or is_first and collective == LL16
        else:
            num_seeds = 1
            takes = is_first and (cell.world_size == 2 or collective == LL16)
        if takes:
            yield Task(str(cell), 0, 1, num_seeds)


@pytest.fixture(scope="module")
def pool():
    """As many processes as there are cores for us."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_is_found(pool, collective, size):
    tasks = list(share(collective, size))
    assert tasks
    total = Counter()
    for result in pool.map(sim_matrix.run, tasks):
        assert not result.kind, str(result)
        total.update(result.stats)
    # The memory was bent, or a run shows nothing.
    assert size == "0" or total["old_loads"] > 0


def test_names_of_cells():
    assert len({str(cell) for cell in CELLS}) == len(CELLS)
    assert all(sim_matrix.Cell.parse(str(cell)) == cell for cell in CELLS[::97])
