"""Checks of every collective over groups: all ranks get the bits of the groups' order.

A sum is made in rank order within a group, and then in the order of the groups. Floats of 8 and 16
bits are rounded once, at the end. A scan goes in rank order, as on at most 8 ranks.
"""

from itertools import product

import numpy as np
import oracle
import programs

from kccl.base import dtypes
from kccl.plan import forms
from kccl.plan.spec import Request

LENGTHS = (1, 7, 300, 40_003)  # the last is divided where the groups have one size


def groups_of(comm):
    grouping = comm.context.backend.grouping
    return (tuple(range(comm.world_size)),) if grouping is None else grouping.groups


def algorithms_for(comm, collective, name, nbytes):
    """The algorithms that can make such a call, and "" for the plan's choice."""
    grouping = comm.context.backend.grouping
    if grouping is None:
        return ["", *programs.algorithms_for(collective, comm.world_size, name)]
    dtype = dtypes.of(name)
    request = Request(collective, nbytes, comm.world_size, "host", dtype)
    every, _ = forms.of_collective(collective)
    return ["", *(form.name for form in every if not form.why_not(request, grouping))]


def reduced(inputs, op, groups):
    """The reduction in the order of the groups."""
    dtype = inputs[0].dtype
    is_float = dtype.name in (*oracle.FLOATS, *oracle.SMALL_FLOATS)
    is_wide = is_float and dtype.itemsize <= 2 and op not in ("min", "max")
    wide = [x.astype(np.float32) for x in inputs] if is_wide else inputs
    step = "sum" if op == "avg" else op
    parts = [oracle.all_reduce([wide[rank] for rank in group], step) for group in groups]
    result = oracle.all_reduce(parts, step)
    if op == "avg":
        reals = result.view(result.real.dtype)
        result = (reals / reals.dtype.type(len(inputs))).view(result.dtype)
    # The reduction of one array makes its NaNs canonical.
    return oracle.all_reduce([result.astype(dtype)], "sum")


def same(found, wanted):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert (oracle.bits(found) == oracle.bits(wanted)).all()


def inputs_of(comm, name, count, salt):
    rng = np.random.default_rng(salt)
    if name == "bool":
        return [rng.integers(0, 2, count).astype(bool) for _ in range(comm.world_size)]
    of = oracle.random_floats if name in oracle.FLOATS else oracle.any_bits
    return [of(name, count, rng) for _ in range(comm.world_size)]


def check_reductions(comm, name, op, lengths=LENGTHS):
    groups, rank = groups_of(comm), comm.rank
    for count in lengths:
        inputs = inputs_of(comm, name, count, count)
        wanted = reduced(inputs, op, groups)
        for algorithm in algorithms_for(comm, "all_reduce", name, wanted.nbytes):
            x = inputs[rank].copy()
            same(comm.all_reduce(x, op=op, algorithm=algorithm), wanted)
            out = np.empty_like(x)
            x = inputs[rank].copy()
            same(comm.all_reduce(x, op=op, out=out, algorithm=algorithm), wanted)
            same(x, inputs[rank])
        if count > 1000:
            continue
        inputs = inputs_of(comm, name, count * comm.world_size, count + 1)
        own = slice(rank * count, (rank + 1) * count)
        wanted = reduced(inputs, op, groups)[own]
        x = inputs[rank].copy()
        same(comm.reduce_scatter(x, op=op), wanted)
        same(comm.reduce_scatter(x, op=op, out=x[own]), wanted)


def of_lower_ranks(inputs, op, number):
    """The reduction of the first ranks, so many, in their order; None: of none."""
    return oracle.all_reduce(inputs[:number], op) if number else None


def check_to_root_and_lower(comm, name, op, lengths=(1, 300)):
    """Reductions whose results differ between ranks."""
    groups, rank = groups_of(comm), comm.rank
    for count in lengths:
        inputs = inputs_of(comm, name, count, count + 2)
        wanted = reduced(inputs, op, groups)
        for algorithm, root in product(
            algorithms_for(comm, "reduce", name, wanted.nbytes),
            {0, comm.world_size // 2, comm.world_size - 1},
        ):
            x, out = inputs[rank].copy(), np.zeros_like(inputs[rank])
            found = comm.reduce(x, root, op=op, out=out, algorithm=algorithm)
            same(x, inputs[rank])
            if rank == root:
                same(found, wanted)
                same(comm.reduce(x, root, op=op), wanted)
            else:
                assert found is None and not oracle.bits(out).any()
                assert comm.reduce(x, root, op=op) is None
                same(x, inputs[rank])
        for exclusive in (False, True):
            wanted_here = of_lower_ranks(inputs, op, rank + 1 - exclusive)
            for algorithm, has_out in product(
                algorithms_for(comm, "scan", name, wanted.nbytes), (False, True)
            ):
                out = np.zeros_like(inputs[rank]) if has_out else None
                x = inputs[rank].copy()
                found = comm.scan(x, op=op, exclusive=exclusive, out=out, algorithm=algorithm)
                if wanted_here is None:
                    assert found is None
                else:
                    same(found, wanted_here)


def check_chunks(comm):
    """What moves a chunk for each rank."""
    rank, world_size = comm.rank, comm.world_size
    for count in (1, 7, 5000):
        whole = np.arange(world_size * world_size * count, dtype=np.int64)
        whole = whole.reshape(world_size, world_size, count)
        wanted = np.ascontiguousarray(whole[:, rank])
        nbytes = whole[0].nbytes
        for algorithm in algorithms_for(comm, "all_to_all", "int64", nbytes):
            same(comm.all_to_all(whole[rank].copy(), algorithm=algorithm), wanted)
            x = whole[rank].copy()
            same(comm.all_to_all(x, out=x, algorithm=algorithm), wanted)
        roots = range(world_size) if count == 7 else (world_size - 1,)
        for algorithm, root in product(algorithms_for(comm, "gather", "int64", nbytes), roots):
            sent, how = whole[rank][root].copy(), {"algorithm": algorithm}
            found = comm.gather(sent, root, **how)
            if rank == root:
                same(found, np.ascontiguousarray(whole[:, root]))
                out = np.zeros((world_size, count), np.int64)
                out[rank] = sent
                same(comm.gather(out[rank], root, out=out, **how), whole[:, root].copy())
            else:
                assert found is None and comm.gather(sent, root, **how) is None
        for algorithm, root in product(algorithms_for(comm, "scatter", "int64", nbytes), roots):
            mine, how = whole[root].copy(), {"algorithm": algorithm}
            out, given = np.zeros(count, np.int64), mine if rank == root else None
            same(comm.scatter(given, root, out=out, **how), whole[root][rank])
            if rank == root:
                same(comm.scatter(mine, root, out=mine[rank], **how), whole[root][rank])
            else:
                comm.scatter(None, root, out=out, **how)


def check_parts(comm):
    """all_to_all with counts: from rank a to rank b go (a + 2 * b) % 3 * count elements."""
    rank, everyone = comm.rank, range(comm.world_size)
    for count in (1, 5000):

        def part(a, b, count=count):
            return np.full((a + 2 * b) % 3 * count, 100 * a + b, np.int32)

        parts, wanted = [part(rank, b) for b in everyone], [part(a, rank) for a in everyone]
        counts = {"send_counts": list(map(len, parts)), "recv_counts": list(map(len, wanted))}
        same(comm.all_to_all(np.concatenate(parts), **counts), np.concatenate(wanted))


def check_moves(comm):
    rank, world_size = comm.rank, comm.world_size
    for count in LENGTHS:
        whole = np.arange(world_size * count, dtype=np.int64).reshape(world_size, count)
        same(comm.all_gather(whole[rank].copy()), whole)
        out = np.full_like(whole, -1)
        out[rank] = whole[rank]
        same(comm.all_gather(out[rank], out=out), whole)
        algorithms = algorithms_for(comm, "broadcast", "int64", whole[0].nbytes)
        for algorithm in algorithms:
            for root in range(world_size) if count == 7 else (world_size - 1,):
                x = whole[rank].copy()
                same(comm.broadcast(x, root, algorithm=algorithm), whole[root])
    comm.barrier()


def check_all(comm):
    check_moves(comm)
    for name, op in (
        ("float32", "sum"),
        ("float16", "avg"),
        ("int32", "prod"),
        ("bfloat16", "max"),
    ):
        check_reductions(comm, name, op)
        check_to_root_and_lower(comm, name, op)
    check_chunks(comm)
    check_parts(comm)
    check_moves(comm)
