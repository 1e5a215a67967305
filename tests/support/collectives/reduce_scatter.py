"""reduce_scatter, as the tests know it: see collectives/__init__.py."""

import oracle
import sim_rows
from moves import Moves

MOVES = Moves(
    lambda rank, world_size, peer: [(range(world_size), rank)], has_chunks=True, reduces=True
)
HAS_CHUNKS = True
AWAITED = 1


def want(inputs, rank, *, op="sum", root=0):
    count = inputs[0].size // len(inputs)
    return oracle.all_reduce([x.reshape(-1)[rank * count :][:count] for x in inputs], op)


def call(comm, x, *, op, root, **keywords):
    return comm.reduce_scatter(x, op=op, **keywords)


def fake(comm, x, out, op="sum"):
    assert op == "sum"
    total = sum(comm.world.exchange(comm.rank, x.copy()))
    out[:] = total[comm.rank * out.size :][: out.size]


def on_simulator(script, actor, kernel, count, *, in_place=False, shifts=(0, 0)):
    """Chunks of `count` elements. In place the other chunks must stay."""
    inputs = script.inputs(count * script.world_size)
    what = f"result of {kernel}, {count} {script.dtype}"
    offsets, wants = [], []
    for rank, x in enumerate(inputs):
        mine = want(inputs, rank, op=script.op)
        if in_place:
            held = x.copy()
            held[rank * count :][:count] = mine
            source = script.place_over(rank, held, x, shift=shifts[0], what=what)
            result = source + rank * mine.nbytes
        else:
            source = script.place(rank, x, is_written=False, shift=shifts[0])
            result = script.place(rank, mine, is_written=True, shift=shifts[1], what=what)
        script.call_on(actor, rank, kernel, source, result, count)
        offsets.append(result)
        wants.append(mine)
    return script.arrays(offsets, wants)


def rows():
    return {"reduce_scatter": _row}


def _row(script, actors, size, rng):
    in_place = bool(rng.integers(2))
    shifts = tuple(rng.choice([0, 0, 4], 2).tolist())
    nbytes = sim_rows.num_bytes(size)
    kernel = sim_rows.any_of("reduce_scatter", script, rng, nbytes, script.world_size)
    for actor in actors:
        count = sim_rows.num_elements(script, size)
        script.reduce_scatter(actor, kernel, count, in_place=in_place, shifts=shifts)
