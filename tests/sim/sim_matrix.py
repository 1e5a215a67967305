"""The matrix in which the simulator must find nothing: every collective, length, world size, warp
width, memory model and width of epochs. test_sim_matrix.py runs a share of it, sim_soak.py all.
"""

import time
import zlib
from collections import Counter
from dataclasses import astuple, dataclass, field
from functools import cache
from itertools import product

import _support  # noqa: F401  # so that collectives is found
import collectives
import numpy as np
import sim_messages
import sim_parts
from sim_machine import ALL_KINDS, EXCHANGE_KINDS, LL16, SENTINEL, Machine
from sim_programs import Script
from sim_rows import SIZES, num_bytes, num_elements, stages

from kccl.jit import cache as jit
from kccl.plan.specs import BY_NAME, SPECS

DTYPES = ("float32", "bfloat16")
_LONG = 8192
_CHANNELS = 4


@dataclass(frozen=True)
class Cell:
    """One combination; str() names it and parse() finds it again."""

    collective: str
    size: str
    world_size: int
    warp_size: int
    model: str
    epoch_bits: int

    def __str__(self):
        return "/".join(map(str, astuple(self)))

    @staticmethod
    def parse(name):
        return _cells()[name]


@cache
def _cells():
    return {str(cell): cell for cell in CELLS}


# ---- One call of a cell, where it is none of a collective in tests/support/collectives -----------


def _put_signal_wait(script, actors, size, rng):
    anyone = bool(rng.integers(2))
    for actor in actors:
        script.signal_ring(actor, num_bytes(size), anyone=anyone)


def _grid_sync(script, actors, size, rng):
    """Every block reduces, and after the sync reduces what another block reduced."""
    kernel = str(rng.choice([LL16, SENTINEL]))
    results = [script.all_reduce(actor, kernel, num_elements(script, size)) for actor in actors]
    is_narrow = script.machine.epoch_bits == 4
    script.grid_sync(int(rng.integers(4, 9) if is_narrow else rng.integers(1, 3)))
    if SIZES[size] != 65536:
        for actor in actors:
            source = results[(actor + 1) % len(actors)]
            script.all_reduce(actor, LL16, num_elements(script, size), source=source)


def _exchange(script, actors, size, rng):
    """Every block collects the slices of all, and then reduces what another block had reduced."""
    is_long = SIZES[size] == 65536
    results = (
        [] if is_long else [script.all_reduce(a, LL16, num_elements(script, size)) for a in actors]
    )
    is_narrow = script.machine.epoch_bits == 4
    times = int(rng.integers(4, 9) if is_narrow and not is_long else rng.integers(1, 3))
    reaches_all = bool(rng.integers(2))
    shifts = tuple(rng.choice([0, 0, 3], 2).tolist())
    # A relaxed exchange orders nothing, so no block may then read another's results.
    orders = bool(results) or bool(rng.integers(2))
    some = {"orders": orders, "share": int(rng.choice([0, 0, 1, 2]))}
    if reaches_all and bool(rng.integers(2)):
        count = num_bytes(size) // script.inputs(1)[0].itemsize
        script.exchange_reduced(count, times, **some)
    else:
        nbytes = num_bytes(size)
        script.exchange(nbytes, times, reaches_all=reaches_all, shifts=shifts, **some)
    for actor, source in zip(actors, results[1:] + results[:1], strict=False):
        script.all_reduce(actor, LL16, num_elements(script, size), source=source)


_OF_SPECS = {}
for _name in dict.fromkeys(spec.collective for spec in SPECS):
    _OF_SPECS |= collectives.load(_name).rows()
COLLECTIVES = {
    **_OF_SPECS,
    **sim_parts.ROWS,
    **sim_messages.ROWS,
    "put_signal_wait": _put_signal_wait,
    "grid_sync": _grid_sync,
    "exchange": _exchange,
    "stage": None,  # in launches of its own
}
CELLS = tuple(
    Cell(*each)
    for each in product(
        COLLECTIVES, SIZES, (1, 2, 3, 4, 5, 8), (32, 64), ("sm_90", "gfx942"), (4, 32)
    )
)
# Collectives in which all blocks of a kernel take part.
GRIDS = ("grid_sync", "exchange")
# Short calls on the same channel, between those of a cell's collective.
FILLING = tuple(name for name in _OF_SPECS if name not in BY_NAME or not stages(BY_NAME[name]))
_FILLERS = tuple(COLLECTIVES[name] for name in FILLING)


# ---- A cell's programs -------------------------------------------------------------------------


def script_of(cell, number, *, trace_events=0, csrc=jit.CSRC):
    """Program `number` of a cell: several calls of its collective on one channel, others between.

    With narrow epochs there are so many calls that the epochs wrap.
    """
    nbytes = num_bytes(cell.size)
    is_long = nbytes >= _LONG
    rng, packet_bytes, dtype, (threads, blocks, coop, style) = drawn(cell, number)
    machine = Machine(
        warp_size=cell.warp_size,
        model=cell.model,
        epoch_bits=cell.epoch_bits,
        packet_bytes=packet_bytes,
        exchange_bytes=_exchange_bytes(cell),
        num_channels=_CHANNELS,
        message_bytes=sim_messages.MESSAGE_BYTES if cell.collective in sim_messages.ROWS else 0,
        trace_events=trace_events,
        csrc=csrc,
    )
    is_exchange = cell.collective == "exchange"
    kinds, fillers = (
        (EXCHANGE_KINDS, (COLLECTIVES[LL16],)) if is_exchange else (ALL_KINDS, _FILLERS)
    )
    script = Script(cell.world_size, machine, dtype=dtype, salt=number, kinds=kinds)
    actors = range(blocks if coop == "Block" else threads // cell.warp_size)
    shape = {"threads": threads, "blocks": blocks, "coop": coop, "style": style}
    script.begin(**shape)
    # Fillers put at most 64 bytes.
    script.window(max(nbytes, 64), len(actors))

    def fill(times):
        for _ in range(times):
            size = str(rng.choice(["0", "8", "odd"], p=[0.2, 0.6, 0.2]))
            fillers[rng.integers(len(fillers))](script, actors, size, rng)

    # How far in its period the channel is when the long calls come.
    lead = int(rng.integers(16)) if cell.epoch_bits == 4 else 0
    num_calls = 1 if nbytes > _LONG else 2 if is_long else 8 if cell.epoch_bits == 4 else 4
    if cell.collective in GRIDS:
        # Each of these makes several calls in each block.
        num_calls = min(num_calls, 3)
    if is_long:
        fill(lead)
    for _ in range(num_calls):
        if cell.collective == "stage":
            num_copying = int(rng.choice([1, 2, 3])) * cell.warp_size
            in_flight = int(rng.integers(1, 6))
            script.stage(-(-nbytes // 16) * 4, threads=num_copying, in_flight=in_flight)
            script.begin(**shape)
        else:
            COLLECTIVES[cell.collective](script, actors, cell.size, rng)
        fill(int(rng.integers(1, 3)))
    return script


def drawn(cell, number):
    """What a program is, without making it, which may compile: the generator of its other choices,
    the bytes of a packet slot, the element type, and what _shape() returns.
    """
    rng = np.random.default_rng([zlib.crc32(str(cell).encode()), number])
    nbytes = num_bytes(cell.size)
    is_long = nbytes >= _LONG
    # Short calls take one round or several. For long calls the slots are only as long as needed,
    # because a scrub of long slots is slow.
    sizes = (64, 256) if not is_long else (4096, 8192) if nbytes > _LONG else (2048, 4096)
    packet_bytes, dtype = int(rng.choice(sizes)), str(rng.choice(DTYPES))
    return rng, packet_bytes, dtype, _shape(cell, is_long, rng)


def _exchange_bytes(cell):
    """Room for the slices of three blocks of all ranks; no more, because a scrub writes it all."""
    if cell.collective != "exchange":
        return 0
    slice_bytes = -(-max(num_bytes(cell.size), 1) // 64) * 64
    return -(-3 * cell.world_size * slice_bytes // 128) * 128


def _shape(cell, is_long, rng):
    """As Script.begin() takes them: threads of a block, blocks, coop and style."""
    warps = int(rng.choice([2, 4] if is_long else [1, 2, 2, 3]))
    threads = min(warps * cell.warp_size, 128)
    if cell.collective in GRIDS:
        return threads, int(rng.integers(2, 4)), "Block", "kernel"
    coop, style = (("Block", "kernel"), ("Warp", "kernel"), ("Block", "calls"))[
        rng.choice(3, p=[0.7, 0.2, 0.1])
    ]
    return min(threads, 64) if is_long and coop == "Warp" else threads, 1, coop, style


# ---- Runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What to run: program number `program` of a cell, under `num_seeds` seeds."""

    cell: str
    program: int
    first_seed: int
    num_seeds: int


@dataclass
class Result:
    """What became of a task.

    Attributes:
        task: The task.
        kind, message: As in Outcome, of the first run that was wrong, which is also the last run.
        seed: That run's seed; -1 if none was wrong.
        num_runs: How many runs were made.
        stats: Sums over the runs, by the fields of KcclSimStats.
        seconds: How long the task took.
    """

    task: Task
    kind: str = ""
    message: str = ""
    seed: int = -1
    num_runs: int = 0
    stats: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self):
        if not self.kind:
            return f"{self.task.cell}: right"
        return f"{self.kind} in {self.task.cell}\n{self.message}\nreplay: {self.replay}"

    @property
    def replay(self):
        return (
            f".venv/bin/python tests/sim/sim_soak.py --replay {self.task.cell} "
            f"--program {self.task.program} --seed {self.seed} --trace out/trace.json"
        )


def run(task):
    """Makes a task's program and runs it."""
    begin = time.perf_counter()
    result = Result(task)
    script = script_of(Cell.parse(task.cell), task.program)
    for seed in range(task.first_seed, task.first_seed + task.num_seeds):
        outcome = script.run(seed)
        result.num_runs += 1
        result.stats.update(outcome.stats)
        if outcome.kind:
            result.kind, result.message, result.seed = outcome.kind, outcome.message, seed
            break
    script.close()
    result.seconds = time.perf_counter() - begin
    return result
