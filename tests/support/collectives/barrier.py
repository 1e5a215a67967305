"""barrier, as the tests know it: see collectives/__init__.py."""

import sim_rows

MOVES = None
HAS_CHUNKS = False
AWAITED = 1


def fake(comm):
    comm.world.exchange(comm.rank, None)


def on_simulator(script, actor):
    for rank in script.ranks:
        script.call(actor, rank, "barrier_direct")


def rows():
    return {"barrier": _row}


def _row(script, actors, size, rng):
    """Bytes to a neighbour, between barriers."""
    pulls = bool(rng.integers(2))
    for actor in actors:
        script.barrier_ring(actor, sim_rows.num_bytes(size), pulls=pulls)
