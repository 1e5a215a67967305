"""all_gather, as the tests know it: see collectives/__init__.py."""

import numpy as np
import sim_rows
from moves import Moves

MOVES = Moves(lambda rank, world_size, peer: [(range(p, p + 1), 0) for p in range(world_size)])
HAS_CHUNKS = False
AWAITED = 1


def want(inputs, rank=0, *, op="sum", root=0):
    return np.concatenate([x.reshape(-1) for x in inputs])


def call(comm, x, *, op, root, **keywords):
    return comm.all_gather(x, **keywords)


def fake(comm, x, out):
    out[:] = np.concatenate(comm.world.exchange(comm.rank, x.copy()))


def on_simulator(script, actor, kernel, nbytes, *, in_place=False, shifts=(0, 0)):
    """Chunks of `nbytes`."""
    inputs = script.random_bytes(nbytes)
    whole = want(inputs)
    what = f"result of {kernel}, {nbytes} bytes a rank"
    offsets = []
    for rank, x in enumerate(inputs):
        if in_place:
            held = np.full(whole.size, 0x3C, np.uint8)
            held[rank * nbytes :][:nbytes] = x
            result = script.place_over(rank, whole, held, shift=shifts[1], what=what)
            source = result + rank * nbytes
        else:
            source = script.place(rank, x, is_written=False, shift=shifts[0])
            result = script.place(rank, whole, is_written=True, shift=shifts[1], what=what)
        script.call_on(actor, rank, kernel, source, result, nbytes)
        offsets.append(result)
    return script.arrays(offsets, [whole] * script.world_size)


def rows():
    return {"all_gather": _row}


def _row(script, actors, size, rng):
    in_place = bool(rng.integers(2))
    shifts = tuple(rng.choice([0, 0, 3], 2).tolist())
    nbytes = sim_rows.num_bytes(size)
    kernel = sim_rows.any_of("all_gather", script, rng, nbytes, script.world_size)
    for actor in actors:
        script.all_gather(actor, kernel, nbytes, in_place=in_place, shifts=shifts)
