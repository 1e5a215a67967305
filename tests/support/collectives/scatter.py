"""scatter, as the tests know it: see collectives/__init__.py."""

from functools import partial

from moves import Moves

MOVES = Moves(
    lambda rank, world_size, root: [(range(root, root + 1), rank)],
    has_chunks=True,
    takes="root",
    only_root_has_x=True,
)
HAS_CHUNKS = True
AWAITED = 0
want = MOVES.want
on_simulator = MOVES.on_simulator


def call(comm, x, *, op, root, **keywords):
    return comm.scatter(x, root, **keywords)


def fake(comm, x, root=0, out=None):
    given = comm.world.exchange(comm.rank, None if x is None else x.copy())
    count = given[root].size // len(given)
    out[:] = given[root][comm.rank * count :][:count]


def rows():
    return {"scatter": partial(MOVES.row, "scatter")}
