"""Makes each collective of mpi4py by KCCL and by mpi4py, and compares what they leave in memory.

The ranks give messages of different forms for the same data, as MPI allows.
"""
# ruff: noqa: B023  A function that a loop makes is called before the loop goes on.

import array
import sys

import numpy as np
from mpi4py import MPI as THEIRS

from kccl.interop import mpi as MPI

comm, theirs = MPI.COMM_WORLD, THEIRS.COMM_WORLD
rank, size = comm.rank, comm.size
# A communicator begins with some calls by MPI.
for _ in range(20):
    comm.Barrier()
assert comm._link, "KCCL makes no calls"

GAPS = MPI.DOUBLE.Create_vector(4, 1, 2).Commit()  # 4 of 8
TWO = MPI.DOUBLE.Create_contiguous(2).Commit()
NUMBERS = np.random.default_rng(rank).integers(0, 9, 64)


def doubles(count):
    return NUMBERS[:count].astype(float)


# Memory of 4 doubles for each block, and a message of it.
FORMS = [
    lambda blocks: (x := doubles(4 * blocks), x),
    lambda blocks: (x := doubles(4 * blocks), [x, MPI.DOUBLE]),
    lambda blocks: (x := doubles(4 * blocks), [x, 4, "d"]),
    lambda blocks: (x := doubles(4 * blocks + 3), [x, (4, 2), MPI.DOUBLE]),
    lambda blocks: (x := array.array("d", doubles(4 * blocks)), x),
    lambda blocks: (x := bytearray(doubles(4 * blocks).tobytes()), [x, 4, MPI.DOUBLE]),
    lambda blocks: (x := memoryview(doubles(4 * blocks)), x),
    lambda blocks: (x := doubles(4 * blocks).reshape(2, -1).T, x),
    # Derived types.
    lambda blocks: (x := doubles(4 * blocks), [x, 2, TWO]),
    lambda blocks: (x := doubles(8 * blocks), [x, 1, GAPS]),
    lambda blocks: (
        x := doubles(8),
        [MPI.BOTTOM, 1, MPI.DOUBLE.Create_hindexed([4], [MPI.Get_address(x)]).Commit()],
    ),
]
REDUCIBLE = range(8)


def forms(which):
    """Indices of forms, another one on each rank."""
    which = list(which)
    for first in range(len(which)):
        yield which[(first + rank) % len(which)], which[(first + 2 * rank + 1) % len(which)]


def compare(what, make, call, times=2):
    """`make` returns the memory and the arguments of a call, anew each time."""
    memory, arguments = make()
    wanted_memory, wanted_arguments = make()
    # In turns, because a communicator sees them as one sequence.
    for _ in range(times):
        getattr(comm, call)(*arguments)
        getattr(theirs, call)(*wanted_arguments)
        mine, wanted = (
            bytes(each) if isinstance(each, bytearray) else np.asarray(each).tobytes()
            for each in (memory, wanted_memory)
        )
        assert mine == wanted, f"rank {rank}: {what}: {call}"


def pair(send, receive, blocks, also=()):
    def make():
        kept, sent = FORMS[send](blocks[0])
        memory, received = FORMS[receive](blocks[1])
        made.append(kept)
        return memory, (sent, received, *also)

    return make


made = []  # what messages point to
for root in range(size):
    for one, other in forms(range(len(FORMS) - 1)):
        compare(
            "forms",
            lambda: FORMS[one](1) and (lambda m: (m[0], (m[1], root)))(FORMS[one](1)),
            "Bcast",
        )
        gathered = pair(one, other, (1, size), (root,))
        compare(
            "forms",
            gathered if rank == root else (lambda: (b"", (gathered()[1][0], None, root))),
            "Gather",
        )
        scattered = pair(one, other, (size, 1), (root,))
        compare(
            "forms",
            scattered
            if rank == root
            else (lambda: (lambda m, a: (m, (None, a[1], root)))(*scattered())),
            "Scatter",
        )
    for one, other in forms(REDUCIBLE):
        reduced = pair(one, other, (1, 1), (MPI.SUM, root))
        compare(
            "forms",
            reduced if rank == root else (lambda: (b"", (reduced()[1][0], None, MPI.SUM, root))),
            "Reduce",
        )
for one, other in forms(range(len(FORMS) - 1)):
    compare("forms", pair(one, other, (1, size)), "Allgather")
    compare("forms", pair(one, other, (size, size)), "Alltoall")
compare("BOTTOM", lambda: FORMS[-1](1) and (lambda m: (m[0], (m[1], 0)))(FORMS[-1](1)), "Bcast")
for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN):
    for one, other in forms(REDUCIBLE):
        for call in ("Allreduce", "Scan", "Exscan"):
            if call != "Exscan" or rank > 0:
                compare("forms", pair(one, other, (1, 1), (op,)), call)
            else:
                # MPI says nothing of rank 0's result.
                getattr(comm, call)(*pair(one, other, (1, 1), (op,))()[1])
                getattr(theirs, call)(*pair(one, other, (1, 1), (op,))()[1])
                getattr(comm, call)(*pair(one, other, (1, 1), (op,))()[1])
                getattr(theirs, call)(*pair(one, other, (1, 1), (op,))()[1])
        compare("forms", pair(one, other, (size, 1), (op,)), "Reduce_scatter_block")

# Some ranks in place, which is a choice of the root alone where there is one; or of all.
for given in (MPI.IN_PLACE, None):
    x = doubles(4 * size)
    for call, more in (
        ("Allreduce", ()),
        ("Allgather", ()),
        ("Alltoall", ()),
        ("Scan", ()),
        ("Reduce_scatter_block", ()),
        ("Reduce_scatter", ([4] * size,)),
    ):
        compare("in place", lambda: (m := doubles(4 * size), (given, m, *more)), call)
    for root in range(size):
        for call in ("Reduce", "Gather"):
            more = (MPI.MAX, root) if call == "Reduce" else (root,)
            compare(
                "in place",
                (lambda: (m := doubles(4 * size), (given, m, *more)))
                if rank == root
                else lambda: (b"", (doubles(4 * size if call == "Reduce" else 4), None, *more)),
                call,
            )
        compare(
            "in place",
            (lambda: (m := doubles(4 * size), (m, given, root)))
            if rank == root
            else lambda: (m := doubles(4), (None, m, root)),
            "Scatter",
        )

# Parts of different lengths, with gaps between them or without.
counts = [(3 * each + 1) % 4 for each in range(size)]
for displs in (
    None,
    [5 * each for each in range(size)],
    [5 * (size - each) for each in range(size)],
):
    where = counts if displs is None else (counts, displs)
    compare(
        "parts",
        lambda: (m := doubles(6 * size), (doubles(counts[rank]), [m, where, MPI.DOUBLE])),
        "Allgatherv",
    )
    for root in range(size):
        compare(
            "parts",
            lambda: (
                m := doubles(6 * size),
                (doubles(counts[rank]), [m, where, MPI.DOUBLE] if rank == root else None, root),
            ),
            "Gatherv",
        )
        compare(
            "parts",
            lambda: (
                m := doubles(counts[rank]),
                ([doubles(6 * size), where, MPI.DOUBLE] if rank == root else None, m, root),
            ),
            "Scatterv",
        )
        lists = [counts, displs or [sum(counts[:each]) for each in range(size)]]
        compare(
            "parts in place",
            (lambda: (m := doubles(6 * size), (MPI.IN_PLACE, [m, *lists, "d"], root)))
            if rank == root
            else lambda: (b"", ([doubles(counts[rank]), "d"], None, root)),
            "Gatherv",
        )
        compare(
            "parts in place",
            (lambda: (m := doubles(6 * size), ([m, *lists, MPI.DOUBLE], MPI.IN_PLACE, root)))
            if rank == root
            else lambda: (m := doubles(4), (None, [m, counts[rank]], root)),
            "Scatterv",
        )
    # What rank a sends to rank b: from nothing, for some nothing at all, to long messages.
    for scale in (1, 3000):
        table = [[(a + 2 * b) % 4 * scale * (a != 1) for b in range(size)] for a in range(size)]
        sent, got = table[rank], [row[rank] for row in table]
        gaps = [0 if displs is None else 7] * size
        at = [[sum(each[:i]) + i * gaps[i] for i in range(size)] for each in (sent, got)]
        compare(
            "parts",
            lambda: (
                m := np.zeros(sum(got) + 8 * size),
                (
                    [np.arange(sum(sent) + 8.0 * size), (sent, at[0]), MPI.DOUBLE],
                    [m, got, at[1], MPI.DOUBLE] if rank % 2 else [m, (got, at[1])],
                ),
            ),
            "Alltoallv",
        )
    same = [[(a + b) % 4 for b in range(size)] for a in range(size)][rank]
    compare("parts", lambda: (m := doubles(64), (MPI.IN_PLACE, [m, (same, None)])), "Alltoallv")
compare(
    "parts",
    lambda: (m := doubles(counts[rank]), (doubles(sum(counts)), m, counts)),
    "Reduce_scatter",
)

# Every type of NumPy's and every operator; what MPI refuses, both refuse.
OPS = ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"]
for code in "?bhilqBHILQfdFD":
    values = (NUMBERS[:5] + 1).astype(code)
    for name in OPS:
        op, result = getattr(MPI, name), []
        for each in (comm, theirs):
            out = np.zeros_like(values)
            try:
                each.Allreduce(values, out, op)
                result.append(out.tobytes())
            except MPI.Exception as error:
                result.append(error.Get_error_class())
        assert result[0] == result[1], f"{code} {name}: {result}"

# What KCCL lacks goes to MPI.
own = MPI.Op.Create(
    lambda a, b, _: np.copyto(np.frombuffer(b), np.frombuffer(a) + np.frombuffer(b)), commute=True
)
pairs = np.array([(float(NUMBERS[0]), rank)], dtype=[("value", "d"), ("at", "i4")])
compare("an operator of the user", lambda: (m := doubles(4), (doubles(4), m, own)), "Allreduce")
compare(
    "MAXLOC",
    lambda: (
        m := np.zeros(16, "u1"),
        (
            [np.array([float(NUMBERS[0]), 0.0]), 1, MPI.DOUBLE_INT],
            [m, 1, MPI.DOUBLE_INT],
            MPI.MAXLOC,
        ),
    ),
    "Allreduce",
)
sums = np.zeros(counts[rank])
comm.Reduce_scatter(doubles(sum(counts)), sums)
assert comm.allreduce(1) == size and comm.bcast([1, 2], root=0) == [1, 2]
request = comm.Iallreduce(doubles(4), y := np.empty(4))
comm.Barrier()
request.Wait()
compare("nothing", lambda: (m := doubles(0), (doubles(0), m)), "Allreduce")
sys.stdout.write("right\n")
