"""scan, as the tests know it: see collectives/__init__.py."""

from functools import partial

from moves import Moves

MOVES = Moves(
    lambda rank, world_size, exclusive: (
        [(range(rank + 1 - exclusive), 0)] if rank + 1 - exclusive else []
    ),
    reduces=True,
    takes="exclusive",
)
HAS_CHUNKS = False
AWAITED = 1
want = MOVES.want
on_simulator = MOVES.on_simulator


def call(comm, x, *, op, root, **keywords):
    return comm.scan(x, op=op, exclusive=root % 2 == 1, **keywords)


def fake(comm, x, out=None, op="sum", exclusive=False):
    inputs = comm.world.exchange(comm.rank, x.copy())
    scanned = want(inputs, comm.rank, op=op, root=int(exclusive))
    if scanned is not None:
        (x if out is None else out)[:] = scanned


def rows():
    return {"scan": partial(MOVES.row, "scan")}
