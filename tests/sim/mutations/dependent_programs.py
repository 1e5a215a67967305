"""Programs whose launches are programmatic dependents: each may begin before the one before has
ended.
"""

from sim_machine import (
    BARRIER,
    BROADCAST,
    BROADCAST_PUSH,
    GATHER,
    GATHER_PUSH,
    LL16,
    PUSH,
    SCATTER,
    SCATTER_PUSH,
    SENTINEL,
    TWO_SHOT_SENTINEL,
)

from .program import NARROW, Program

_EARLY = {"style": "calls", "dependents": "early"}


def _results_read_on(script):
    """Each call reads the result of the one before, by another kernel."""
    script.begin(threads=2 * script.machine.warp_size, **_EARLY)
    for count in (37, 2, 64):
        result = None
        for kernel in (LL16, SENTINEL, TWO_SHOT_SENTINEL, LL16):
            result = script.all_reduce(0, kernel, count, source=result)


def _kinds_in_turn(script):
    script.begin(threads=2 * script.machine.warp_size, **_EARLY)
    for number in range(2):
        script.all_reduce(0, LL16, 75)
        script.broadcast(0, 120, number)
        script.reduce_scatter(0, SCATTER, 37, in_place=True)
        script.barrier(0)
        script.all_gather(0, GATHER, 150, in_place=True)
        script.all_reduce(0, PUSH, 250)
        script.reduce_scatter(0, SCATTER_PUSH, 37)
        script.all_gather(0, GATHER_PUSH, 150)
        script.broadcast(0, 600, number, kernel=BROADCAST_PUSH)


def _one_sided(script):
    """Calls that let nothing in, and wait as others do."""
    script.begin(threads=2 * script.machine.warp_size, **_EARLY)
    script.window(512)
    for number in range(3):
        script.signal_ring(0, 400, anyone=number % 2 == 1)


def _of_grids(script):
    script.begin(threads=script.machine.warp_size, blocks=3, **_EARLY)
    for number in range(3):
        script.all_reduce(0, LL16, 150)
        script.grid_sync(1 + number)
        script.exchange_of_grid(20)
        script.exchange_of_grid(300)


def _chains(dependents):
    """Two chains of calls compete for room."""

    def make(script):
        script.begin(
            threads=script.machine.warp_size, style="calls", streams=2, dependents=dependents
        )
        for number in range(16):
            for actor in range(2):
                script.all_reduce(actor, LL16, 2 + number)

    return make


PROGRAMS = {
    "dependents": Program(_results_read_on, 3, (LL16, SENTINEL, TWO_SHOT_SENTINEL), NARROW),
    "dependents of all kinds": Program(
        _kinds_in_turn,
        3,
        (
            *(LL16, BROADCAST, SCATTER, BARRIER, GATHER),
            *(PUSH, SCATTER_PUSH, GATHER_PUSH, BROADCAST_PUSH),
        ),
        NARROW,
    ),
    "one-sided dependents": Program(_one_sided, 3, ("put", "get", "signal", "wait")),
    "dependents of grids": Program(
        _of_grids,
        2,
        (LL16, "grid_sync", "grid_exchange"),
        {**NARROW, "num_channels": 3, "blocks_per_channel": 3},
    ),
    # Each launch has a block: so four calls have room, two of each chain.
    "chains of dependents": Program(
        _chains("early"), 2, (LL16,), {"num_channels": 2, "most_blocks": 4}
    ),
    "chains of large dependents": Program(
        _chains("late"), 2, (LL16,), {"num_channels": 2, "most_blocks": 2}
    ),
}
