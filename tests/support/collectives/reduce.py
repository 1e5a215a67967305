"""reduce, as the tests know it: see collectives/__init__.py."""

from functools import partial

from moves import Moves

MOVES = Moves(
    lambda rank, world_size, root: [(range(world_size), 0)] if rank == root else [],
    reduces=True,
    takes="root",
)
HAS_CHUNKS = False
AWAITED = 0
want = MOVES.want
on_simulator = MOVES.on_simulator


def call(comm, x, *, op, root, **keywords):
    return comm.reduce(x, root, op=op, **keywords)


def fake(comm, x, root=0, out=None, op="sum"):
    reduced = want(comm.world.exchange(comm.rank, x.copy()), comm.rank, op=op, root=root)
    if reduced is not None:
        (x if out is None else out)[:] = reduced


def rows():
    return {"reduce": partial(MOVES.row, "reduce")}
