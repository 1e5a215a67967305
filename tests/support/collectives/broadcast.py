"""broadcast, as the tests know it: see collectives/__init__.py."""

import sim_rows
from moves import Moves

MOVES = Moves(
    lambda rank, world_size, root: [(range(root, root + 1), 0)], takes="root", is_in_place=True
)
HAS_CHUNKS = False
AWAITED = 0


def want(inputs, rank, *, op="sum", root=0):
    return inputs[root]


def call(comm, x, *, op, root, **keywords):
    return comm.broadcast(x, root, **keywords)


def fake(comm, x, root=0):
    x[:] = comm.world.exchange(comm.rank, x.copy())[root]


def on_simulator(script, actor, nbytes, root, *, kernel="broadcast_direct_ll16", shifts=(0, 0)):
    """A message of `nbytes`."""
    sent = script.random_bytes(nbytes)[root]
    offsets = []
    for rank in script.ranks:
        is_root = rank == root
        offset = script.place(
            *(rank, sent),
            is_written=not is_root,
            shift=shifts[0 if is_root else 1],
            what=f"{kernel} of {nbytes} bytes from {root}",
        )
        address = script.address(rank, offset)
        where = {"input": address} if is_root else {"output": address}
        script.call(actor, rank, kernel, count=nbytes, peer=root, **where)
        offsets.append(offset)
    return script.arrays(offsets, [sent] * script.world_size)


def rows():
    return {"broadcast": _row}


def _row(script, actors, size, rng):
    root = int(rng.integers(script.world_size))
    shifts = tuple(rng.choice([0, 0, 3], 2).tolist())
    nbytes = sim_rows.num_bytes(size)
    kernel = sim_rows.any_of("broadcast", script, rng, nbytes, 1)
    for actor in actors:
        script.broadcast(actor, nbytes, root, kernel=kernel, shifts=shifts)
