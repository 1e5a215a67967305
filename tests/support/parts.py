"""Calls in which parts have lengths of their own (the argument `counts`), and their results."""

import numpy as np
import oracle

HOWS = ("allocated", "given", "in place")


def begins(counts):
    return np.concatenate(([0], np.cumsum(counts)[:-1])).astype(int)


def pieces(counts, dtype, salt):
    """Each rank's elements."""
    rng = np.random.default_rng(salt)
    return [rng.integers(0, 100, count).astype(dtype) for count in counts]


def place(how, whole, own, rank, counts):
    """The larger and the smaller array of a call, as `how` says."""
    begin = begins(counts)[rank]
    inner = whole[begin : begin + counts[rank]] if how == "in place" else np.zeros_like(own)
    return whole, inner


def check_all_gather(comm, how, counts, dtype, **keywords):
    every = pieces(counts, dtype, len(counts))
    want, x = np.concatenate(every), every[comm.rank]
    out = None
    if how != "allocated":
        out, inner = place(how, np.zeros_like(want), x, comm.rank, counts)
        if how == "in place":
            inner[:] = x
            x = inner
    got = comm.all_gather(x, out=out, counts=counts, **keywords)
    assert out is None or got is out
    oracle.assert_same(got, want, "all_gather", how, counts)


def check_gather(comm, how, counts, dtype, root, **keywords):
    every = pieces(counts, dtype, 7)
    want, x = np.concatenate(every), every[comm.rank].copy()
    out = None
    if how != "allocated" and comm.rank == root:
        out, inner = place(how, np.zeros_like(want), x, comm.rank, counts)
        if how == "in place":
            inner[:] = x
            x = inner
    got = comm.gather(x, root, out=out, counts=counts, **keywords)
    if comm.rank != root:
        assert got is None
    else:
        oracle.assert_same(got, want, "gather", how, counts)


def check_scatter(comm, how, counts, dtype, root, **keywords):
    every = pieces(counts, dtype, 8)
    whole, want = np.concatenate(every), every[comm.rank]
    x, out = whole, None
    if how != "allocated":
        is_root = comm.rank == root
        x, out = place(how if is_root else "given", whole, want, comm.rank, counts)
        x = x if is_root else None
    got = comm.scatter(x, root, out=out, counts=counts, **keywords)
    oracle.assert_same(got, want, "scatter", how, counts)


def check_reduce_scatter(comm, how, counts, dtype, op, **keywords):
    inputs = [np.concatenate(pieces(counts, dtype, 9 + rank)) for rank in range(comm.world_size)]
    own = slice(begins(counts)[comm.rank], begins(counts)[comm.rank] + counts[comm.rank])
    want = oracle.all_reduce(inputs, op)[own]
    x, out = inputs[comm.rank], None
    if how != "allocated":
        x, out = place(how, x, want, comm.rank, counts)
    got = comm.reduce_scatter(x, out=out, op=op, counts=counts, **keywords)
    oracle.assert_same(got, want, "reduce_scatter", how, counts)


def table_of(counts, how):
    """Elements from each rank to each; in place as many both ways."""
    size = len(counts)
    if how == "in place":
        return [[counts[(a + b) % size] for b in range(size)] for a in range(size)]
    # The first rank sends nothing.
    return [[counts[b] if a % 3 else 0 for b in range(size)] for a in range(size)]


def check_all_to_all(comm, how, counts, dtype, **keywords):
    table = table_of(counts, how)
    sent = [pieces(row, dtype, a) for a, row in enumerate(table)]
    x = np.concatenate(sent[comm.rank])
    want = np.concatenate([sent[a][comm.rank] for a in range(comm.world_size)])
    out = {"allocated": None, "given": np.zeros_like(want), "in place": x}[how]
    receives = [row[comm.rank] for row in table]
    got = comm.all_to_all(
        x, out=out, send_counts=table[comm.rank], recv_counts=receives, **keywords
    )
    oracle.assert_same(got, want, "all_to_all", how, counts)


def check_all(comm, counts, dtype="int32"):
    for number, how in enumerate(HOWS):
        keywords = {"channel": number % comm.num_channels}
        check_all_gather(comm, how, counts, dtype, **keywords)
        for root in {0, comm.world_size - 1}:
            check_gather(comm, how, counts, dtype, root, **keywords)
            check_scatter(comm, how, counts, dtype, root, **keywords)
        check_reduce_scatter(comm, how, counts, dtype, "sum", **keywords)
        check_all_to_all(comm, how, counts, dtype, **keywords)
        # Calls of equal parts between them use the same slots.
        assert (comm.all_reduce(np.ones(3, np.float32)) == comm.world_size).all()
