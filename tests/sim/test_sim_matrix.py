"""The simulator finds nothing in a share of the matrix, on the largest machine, and in any schedule
of the smallest programs.

The whole matrix takes hours: `make sim-soak`.
"""

import json
import resource
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count
from multiprocessing import get_context

import pytest
import sim_matrix
import sim_soak
from long import long_after
from rich.console import Console
from sim_machine import LL16, Machine
from sim_matrix import CELLS, COLLECTIVES, GRIDS, SIZES, Cell, Task
from sim_mutations import BY_NAME, plant
from sim_programs import Script
from source_tree import ROOT

from kccl.jit import cache

# What `make test` runs: both models and widths of epochs with kernels of one warp size. All forms
# of an exchange take half a minute to compile, and test_publish.py has most of them.
MACHINES = ((32, "sm_90", 4), (32, "gfx942", 32))
FEW = ("odd",)
FEWER = [name for name in COLLECTIVES if name != "exchange"]
# (warp size, model, epoch bits): half of the combinations, with every pair of values.
PAIRS = {(32, "sm_90", 4), (32, "gfx942", 32), (64, "sm_90", 32), (64, "gfx942", 4)}
# A quarter of the combinations, with every value.
ONCE = {(32, "sm_90", 4), (64, "gfx942", 32)}
# (element type, group of threads, style) of the programs by warp size: every value of each. A form
# is a unit that takes a second to compile, and an exchange's takes 25.
FORMS = {
    32: {("float32", "Block", "kernel"), ("bfloat16", "Block", "calls")},
    64: {("float32", "Block", "kernel"), ("bfloat16", "Warp", "kernel")},
}
FORMS_OF_EXCHANGES = {32: {("float32", "Block", "kernel")}, 64: {("bfloat16", "Block", "kernel")}}


def share(collective, size):
    """The tasks of a row of the matrix: fewer of the cells where a run costs more."""
    for cell in CELLS:
        if (cell.collective, cell.size) != (collective, size):
            continue
        machine = (cell.warp_size, cell.model, cell.epoch_bits)
        is_first = machine == min(PAIRS)
        is_grid = collective in GRIDS
        if is_grid and (cell.world_size == 8 or size == "8K"):
            # Up to three blocks of each rank: slow.
            takes = is_first and (cell.world_size in (2, 3) if size == "8K" else size == "odd")
        elif size in ("0", "8", "odd"):
            # The length that is no whole number of packets runs on most machines.
            is_odd = size == "odd"
            one = {min(PAIRS)}
            machines = {2: PAIRS if is_odd else ONCE, 3: ONCE, 4: one}
            machines |= dict.fromkeys((1, 5, 8), one if is_odd else set())
            takes = machine in machines[cell.world_size] or (
                is_odd and cell.world_size == 2 and not is_grid
            )
        elif size == "8K":
            takes = (machine in ONCE and cell.world_size in (2, 3)) or (
                is_first and (cell.world_size == 4 or collective == LL16)
            )
        else:
            takes = is_first and (cell.world_size == 2 or collective == LL16)
        if takes:
            forms = FORMS_OF_EXCHANGES if collective == "exchange" else FORMS
            program = next(each for each in count() if form(cell, each) in forms[cell.warp_size])
            yield Task(str(cell), program, 1, 1)


def form(cell, program):
    _, _, dtype, (_, _, coop, style) = sim_matrix.drawn(cell, program)
    return dtype, coop, style


def is_usual(cell, program):
    """Whether a program calls the kernel that most call. Others take ten seconds to compile."""
    return form(cell, program) == ("float32", "Block", "kernel")


def few(collective, size):
    """The tasks that `make test` runs: two ranks on one machine, three on the other."""
    for task in share(collective, size):
        cell = Cell.parse(task.cell)
        machine = cell.warp_size, cell.model, cell.epoch_bits
        if (cell.world_size, machine) in zip((2, 3), MACHINES, strict=True):
            program = next(number for number in count() if is_usual(cell, number))
            yield replace(task, program=program)


def assert_nothing_is_found(tasks, size):
    assert tasks
    total = Counter()
    for task in tasks:
        result = sim_matrix.run(task)
        assert not result.kind, str(result)
        total.update(result.stats)
    # Memory must have reordered something, or the runs show nothing.
    assert size == "0" or total["old_loads"] > 0


@pytest.mark.parametrize("size", FEW)
@pytest.mark.parametrize("collective", FEWER)
def test_nothing_is_found(collective, size):
    assert_nothing_is_found(list(few(collective, size)), size)


@pytest.mark.long
@pytest.mark.takes(20)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_is_found_on_more_machines(collective, size):
    assert_nothing_is_found(list(share(collective, size)), size)


def in_another_process(function, *arguments):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_all(tasks):
    return [sim_matrix.run(task) for task in tasks]


@pytest.mark.long
@pytest.mark.takes(30)
def test_a_seed_is_a_run_in_any_process():
    """A finding can be replayed, because nothing depends on the addresses of memory."""
    cells = [cell for cell in CELLS if cell.size == "odd" and cell.world_size == 3]
    tasks = [Task(str(cell), 7, 3, 2) for cell in cells[::40]]
    there = in_another_process(run_all, tasks)
    _shifts_what_comes_next = [bytearray(77 * size) for size in range(40)]
    for task, result in zip(reversed(tasks), reversed(there), strict=True):
        assert sim_matrix.run(task).stats == result.stats, task


def largest():
    """A program on 132 blocks x 512 threads x 4 ranks: its outcome, and the memory it took."""
    machine = Machine(num_channels=132, packet_bytes=64, schedule="round_robin")
    script = Script(4, machine, kinds=(LL16, "grid_sync"))
    script.begin(threads=512, blocks=132)
    for block in range(132):
        script.all_reduce(block, LL16, 5)
    script.grid_sync()
    outcome = script.run(1)
    return outcome, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.long
def test_the_largest_machine():
    """270,336 threads run: each block makes an all_reduce of its own, then all blocks sync."""
    outcome, peak_bytes = in_another_process(largest)
    assert not outcome.kind, outcome.message
    assert outcome.stats["loads"] > 4 * 132 * 512
    assert peak_bytes < 4e9


def smallest(threads, calls, csrc=cache.CSRC):
    """Two ranks of one block, on a machine that tries one schedule after another."""
    machine = Machine(schedule="exhaustive", epoch_bits=4, packet_bytes=32, csrc=csrc)
    script = Script(2, machine, kinds=(LL16,))
    script.begin(threads=threads)
    for _ in range(calls):
        script.all_reduce(0, LL16, 2)
    return script


@pytest.mark.parametrize(
    ("threads", "calls", "least"),
    long_after(1, [(32, 1, 500), (32, 2, 1000), (64, 2, 3000)]),
)
def test_all_schedules_of_the_smallest(threads, calls, least):
    """All with one deviation."""
    outcomes = list(smallest(threads, calls).explore(1, limit=20000))
    assert [outcome.message for outcome in outcomes if outcome.kind] == []
    # Below the limit the search has ended by itself: there are no more schedules.
    assert least < len(outcomes) < 20000


@pytest.mark.parametrize(
    "name", long_after(1, ["one_flag_of_two", "packets_tear_at_4_bytes", "wrong_parity"])
)
def test_one_deviation_shows_a_bug(name, tmp_path):
    csrc = plant(BY_NAME[name], tmp_path)
    outcomes = smallest(32, 1, csrc).explore(2, limit=20000)
    assert any(outcome.kind in BY_NAME[name].verdicts for outcome in outcomes)


# ---- The soak ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_soak_counts_what_it_does():
    console = Console(record=True, width=140)
    results = sim_soak.soak(0.03, first=1, console=console)
    assert results and not any(result.kind for result in results)
    found = sim_soak.rows(results)
    assert sum(row["schedules"] for row in found) == sum(result.num_runs for result in results)
    console.print(sim_soak.table(found))
    assert "overtaken stores" in console.export_text()


@pytest.mark.long
def test_a_finding_can_be_replayed(tmp_path):
    result = sim_matrix.Result(Task("broadcast/odd/3/64/gfx942/4", 2, 5, 1), "deadlock", seed=6)
    script, *arguments = shlex.split(result.replay)[1:]
    trace = tmp_path / "trace.json"
    arguments[arguments.index("--trace") + 1] = str(trace)
    command = [sys.executable, ROOT / script, *arguments]
    # This run is right.
    assert "right" in subprocess.check_output(command, text=True)
    assert len(json.loads(trace.read_text())["traceEvents"]) > 1000
