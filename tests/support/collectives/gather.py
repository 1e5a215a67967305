"""gather, as the tests know it: see collectives/__init__.py."""

from functools import partial

from moves import Moves

MOVES = Moves(
    lambda rank, world_size, root: (
        [(range(p, p + 1), 0) for p in range(world_size)] if rank == root else []
    ),
    takes="root",
)
HAS_CHUNKS = False
AWAITED = 0
want = MOVES.want
on_simulator = MOVES.on_simulator


def call(comm, x, *, op, root, **keywords):
    return comm.gather(x, root, **keywords)


def fake(comm, x, root=0, out=None):
    gathered = want(comm.world.exchange(comm.rank, x.copy()), comm.rank, root=root)
    if gathered is not None:
        out[:] = gathered


def rows():
    return {"gather": partial(MOVES.row, "gather")}
