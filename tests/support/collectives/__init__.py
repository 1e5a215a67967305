"""What the tests know of each collective: one file each, found in this folder by its name.

A file has
    MOVES         which data goes where (moves.py); None for barrier.
    HAS_CHUNKS    whether x has a chunk for each rank.
    AWAITED       a rank for which all others wait, if the root is 0.
    want          (inputs, rank, *, op, root) -> a rank's right result, with one dimension; None if
                  it has none. Where no root is taken, `root` is a number that varies the call.
    call          (comm, x, *, op, root, **keywords) -> the result of the call on this rank.
    fake          (comm, ...) -> None: the call of bench_world.FakeComm, as the benches make it.
    on_simulator  (script, actor, ...) -> the result: a call of all ranks, for sim_programs.Script,
                  which has it as a method of the collective's name.
    rows          () -> name: row of the simulator's matrix. row(script, actors, size, rng) adds one
                  call for each actor; see sim_rows.py.
That of barrier, which has no data, has no want and no call.
"""

import importlib
import pkgutil

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name):
    """The module of one collective."""
    return importlib.import_module(f"{__name__}.{name}")
