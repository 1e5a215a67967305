"""all_reduce, as the tests know it: see collectives/__init__.py."""

from functools import partial

import numpy as np
import oracle
import sim_rows
from moves import Moves

from kccl.plan.spec import needs_floats
from kccl.plan.specs import BY_NAME

MOVES = Moves(lambda rank, world_size, peer: [(range(world_size), 0)], reduces=True)
HAS_CHUNKS = False
AWAITED = 1


def want(inputs, rank, *, op="sum", root=0):
    return oracle.all_reduce(inputs, op)


def call(comm, x, *, op, root, **keywords):
    return comm.all_reduce(x, op=op, **keywords)


def fake(comm, x, out=None, op="sum"):
    steps = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    inputs = comm.world.exchange(comm.rank, x.copy())
    total = inputs[0]
    for other in inputs[1:]:
        total = steps[op](total, other)
    result = x if out is None else out
    result[:] = total
    if comm.world.broken:
        comm.world.broken(result, comm.rank)


def on_simulator(
    script, actor, kernel, count, *, source=None, in_place=False, shifts=(0, 0), absent=()
):
    """Returns its result, which may be the `source` of a later call.

    Args:
        count: Elements of the message.
        source: The input; None for a new one.
        absent: Ranks that do not make the call.
    """
    armed = needs_floats in BY_NAME[kernel].needs
    values = script.inputs(count, armed=armed) if source is None else list(source.values)
    want = oracle.all_reduce(values, script.op)
    what = f"result of {kernel}, {count} {script.dtype}"
    if in_place:
        offsets = [script.place_over(r, want, values[r], what=what) for r in script.ranks]
        source = out = script.arrays(offsets, values)
    else:
        source = source or script.array(values, shift=shifts[0])
        offsets = [
            script.place(r, want, is_written=True, shift=shifts[1], what=what) for r in script.ranks
        ]
        out = script.arrays(offsets, [want] * script.world_size)
    for rank in set(script.ranks) - set(absent):
        script.call_on(actor, rank, kernel, source.offsets[rank], out.offsets[rank], count)
    return script.arrays(out.offsets, [want] * script.world_size)


def rows():
    """Each algorithm has a row of its own."""
    return {spec.name: partial(_row, spec.name) for spec in sim_rows.kernels_of("all_reduce")}


def _row(kernel, script, actors, size, rng):
    in_place = bool(rng.integers(2))
    shifts = tuple(rng.choice([0, 0, 4], 2).tolist())
    for actor in actors:
        count = sim_rows.num_elements(script, size)
        script.all_reduce(actor, kernel, count, in_place=in_place, shifts=shifts)
