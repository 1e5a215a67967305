"""Ranks that make different calls are told so, on all ranks."""

import time
from array import array

import numpy as np
import preloaded
import pytest
from long import long_after

import kccl

KIB, MIB = 1 << 10, 1 << 20
CMA = "all_reduce_two_shot_cma_simple"


def floats(nbytes):
    return np.ones(nbytes // 4, np.float32)


def differ(calls, world_size=2):
    """Makes calls[rank](comm), or the last one's, and returns what each rank raised."""

    def main(comm):
        comm.barrier()
        comm.barrier()
        comm.timeout = 20
        with pytest.raises(kccl.InvalidArgument) as raised:
            calls[min(comm.rank, len(calls) - 1)](comm)
            comm.barrier()
        with pytest.raises(kccl.InvalidArgument):
            comm.all_reduce(floats(8))
        comm.reset()
        x = np.full(2, comm.rank, np.int32)
        assert comm.all_reduce(x)[0] == sum(range(world_size))
        return str(raised.value)

    return kccl.run_threads(main, world_size)


# The bytes of each rank, and the algorithm on each.
LENGTHS = [
    (8 * MIB, 4 * MIB, CMA, CMA),
    (8 * MIB, 8 * MIB - 4, CMA, CMA),
    (8 * MIB, 64 * KIB, CMA, "all_reduce_two_shot_pull_simple"),
    (64 * KIB, 32 * KIB, "all_reduce_two_shot_pull_simple", "all_reduce_one_shot_pull_simple"),
    (4 * KIB, 2 * KIB, "all_reduce_one_shot_pull_simple", "all_reduce_one_shot_pull_simple"),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("first", "other", "algorithm", "others"), LENGTHS)
def test_all_reduces_of_unequal_lengths(world_size, first, other, algorithm, others):
    told = differ(
        [
            lambda comm: comm.all_reduce(floats(first), algorithm=algorithm),
            lambda comm: comm.all_reduce(floats(other), algorithm=others),
        ],
        world_size,
    )
    names = {f"{algorithm}, {first} bytes", f"{others}, {other} bytes"}
    for text in told:
        assert text.startswith("the ranks disagree about this call: rank ")
        assert all(f"rank 0: {algorithm}, {first} bytes, float32, sum" in text for text in told)
        assert all(name in text for name in names)
        assert "comm.reset()" in text


OTHERS = {
    "operator": (
        lambda comm: comm.all_reduce(floats(MIB), op="max"),
        lambda comm: comm.all_reduce(floats(MIB)),
        ["float32, max", "float32, sum"],
    ),
    "type": (
        lambda comm: comm.all_reduce(floats(MIB)),
        lambda comm: comm.all_reduce(floats(MIB).view(np.int32)),
        ["float32, sum", "int32, sum"],
    ),
    "collective": (
        lambda comm: comm.all_reduce(floats(32 * KIB)),
        lambda comm: comm.all_gather(floats(32 * KIB)),
        ["all_reduce_", "all_gather_pull_simple, 32768 bytes, float32;"],
    ),
    "reduce_scatter": (
        lambda comm: comm.reduce_scatter(floats(512 * KIB)),
        lambda comm: comm.reduce_scatter(floats(256 * KIB)),
        ["524288 bytes, float32", "262144 bytes, float32"],
    ),
    "all_gather": (
        lambda comm: comm.all_gather(floats(256 * KIB)),
        lambda comm: comm.all_gather(floats(128 * KIB)),
        ["262144 bytes, float32;", "131072 bytes, float32;"],
    ),
    "broadcast": (
        lambda comm: comm.broadcast(floats(256 * KIB)),
        lambda comm: comm.broadcast(floats(128 * KIB)),
        ["262144 bytes, float32;", "131072 bytes, float32;"],
    ),
    # Rank 0 finds it in its next call, because a root waits for nobody.
    "roots": (
        lambda comm: comm.broadcast(floats(256 * KIB), root=0),
        lambda comm: comm.broadcast(floats(256 * KIB), root=1),
        ["broadcast_pull_simple, root 0, 262144", "broadcast_pull_simple, root 1, 262144"],
    ),
    "no root": (
        lambda comm: comm.broadcast(floats(256 * KIB), root=1),
        lambda comm: comm.broadcast(floats(256 * KIB), root=0),
        ["root 0", "root 1"],
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_calls_of_other_kinds(what):
    *calls, words = OTHERS[what]
    for text in differ(calls):
        assert text.startswith("the ranks disagree about this call: rank ")
        assert all(word in text for word in words), text


# What the first rank does and what the others do. Each call is the first of its kind.
SMALL = {
    "lengths": (
        lambda comm: comm.all_reduce(floats(8)),
        lambda comm: comm.all_reduce(floats(16)),
        ["8 bytes, float32, sum", "16 bytes, float32, sum"],
    ),
    "types": (
        lambda comm: comm.all_reduce(floats(8)),
        lambda comm: comm.all_reduce(np.ones(2, np.int32)),
        ["8 bytes, float32, sum", "8 bytes, int32, sum"],
    ),
    "operators": (
        lambda comm: comm.all_reduce(floats(8), op="max"),
        lambda comm: comm.all_reduce.prepare(floats(8))(),
        ["8 bytes, float32, max", "8 bytes, float32, sum"],
    ),
    "barrier": (
        lambda comm: comm.all_gather(floats(8)),
        lambda comm: comm.barrier(),
        ["all_gather_", "barrier_direct, 0 bytes"],
    ),
    "collectives": (
        lambda comm: comm.all_reduce(floats(24)),
        lambda comm: comm.reduce_scatter(floats(24)),
        ["all_reduce_one_shot_", "reduce_scatter_"],
    ),
    "protocols": (
        lambda comm: comm.all_reduce(floats(8)),
        lambda comm: comm.all_reduce(floats(64 * KIB)),
        ["8 bytes, float32, sum", "65536 bytes, float32, sum"],
    ),
    "roots": (
        lambda comm: comm.broadcast(floats(8), root=0),
        lambda comm: comm.broadcast(floats(8), root=1),
        ["root 0, 8 bytes", "root 1, 8 bytes"],
    ),
    "no root": (
        lambda comm: comm.broadcast(floats(8), root=1),
        lambda comm: comm.broadcast(floats(8), root=0),
        ["root 1, 8 bytes", "root 0, 8 bytes"],
    ),
    "broadcasts": (
        lambda comm: comm.broadcast(floats(8)),
        lambda comm: comm.broadcast(floats(16)),
        ["root 0, 8 bytes", "root 0, 16 bytes"],
    ),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", SMALL)
def test_small_calls_that_differ(what, world_size):
    *calls, words = SMALL[what]
    for text in differ(calls, world_size):
        assert text.startswith("the ranks disagree about this call: rank ")
        assert all(word in text for word in words), text


def even_parts(comm, x):
    return [x.size // comm.world_size] * comm.world_size


# Calls that only move bytes.
MOVES = {
    "broadcast": lambda comm, x: comm.broadcast(x),
    "prepared": lambda comm, x: comm.broadcast.prepare(x, root=1)(),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(x, out=x[: x.size // comm.world_size].copy()),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "gather of parts": lambda comm, x: comm.all_gather(x, counts=[x.size] * comm.world_size),
    "all_to_all of parts": lambda comm, x: comm.all_to_all(
        x, send_counts=even_parts(comm, x), recv_counts=even_parts(comm, x)
    ),
}
# Types that KCCL knows, and types that it only moves.
TYPES = [("int32", "float32"), ("M8[s]", "M8[ms]")]


OF_TEN = long_after(2, [("gather", 10), *((each, 10) for each in MOVES if each != "gather")])


@pytest.mark.parametrize(("what", "world_size"), [*((each, 2) for each in MOVES), *OF_TEN])
def test_calls_that_only_move_bytes_compare_types(what, world_size):
    if world_size > 8 and what == "all_to_all of parts":
        return
    # The chunks of a longer all_to_all of so many ranks are messages, which compare lengths only.
    longest = 40 * KIB if world_size > 8 and what == "all_to_all" else 640 * KIB
    for nbytes in (16 * world_size, longest):
        for types in TYPES if nbytes < KIB and world_size == 2 else TYPES[:1]:

            def main(comm, nbytes=nbytes, types=types):
                kind = np.dtype(types[comm.rank > 0])
                with pytest.raises(kccl.InvalidArgument) as raised:
                    MOVES[what](comm, np.ones(nbytes // kind.itemsize, "i4").astype(kind))
                    comm.barrier()
                return str(raised.value)

            for text in kccl.run_threads(main, world_size):
                assert text.startswith("the ranks disagree about this call: rank ")
                words = types if types == TYPES[0] else ["a type that KCCL only moves (check sum"]
                assert all(word in text for word in words), text


@pytest.mark.parametrize("what", ["broadcast", "all_to_all of parts"])
def test_the_simulator_compares_types_too(what):
    def main(comm):
        MOVES[what](comm, np.ones(4, TYPES[0][comm.rank]))

    with pytest.raises(kccl.ProtocolError, match=r"calls differ.*(int32|float32).*(int32|float32)"):
        kccl.run_threads(main, 2, backend="sim", seed=0)


def test_small_calls_that_differ_and_were_made_before():
    """One rank has its result, and the other waits for words that do not come."""
    x, y = floats(8), floats(16)

    def before(comm):
        for _ in range(3):
            comm.all_reduce(x.copy())
            comm.all_reduce(y.copy())
            comm.broadcast(x.copy(), root=0)
            comm.broadcast(x.copy(), root=1)

    def first(comm):
        before(comm)
        comm.all_reduce(x.copy())

    def other(comm):
        before(comm)
        comm.all_reduce(y.copy())

    for text in differ([first, other]):
        assert "8 bytes, float32, sum; " in text and "16 bytes, float32, sum; " in text

    def root(number):
        return lambda comm: (before(comm), comm.broadcast(x.copy(), root=number))

    for text in differ([root(0), root(1)]):
        assert "root 0, 8 bytes" in text and "root 1, 8 bytes" in text


@pytest.mark.parametrize("nbytes", [8, 64 * KIB])
def test_a_rank_that_is_late_makes_no_other_call(nbytes):
    """Others look at its call meanwhile, and a time-out does not say that it makes another."""

    def main(comm):
        comm.all_reduce(floats(nbytes))
        comm.broadcast(floats(nbytes))
        for make in (
            lambda: comm.all_reduce(floats(nbytes)),
            lambda: comm.broadcast(floats(nbytes), root=1),
            lambda: comm.all_gather(floats(nbytes)),
        ):
            for late in range(2):
                if comm.rank == late:
                    time.sleep(0.05)
                make()
        comm.barrier()
        comm.timeout = 0.1
        if comm.rank == 0:
            with pytest.raises(kccl.Timeout, match=r"peer 1 did not arrive; rank 0 waited"):
                comm.all_reduce(floats(nbytes))
        else:
            time.sleep(0.5)
            with pytest.raises(
                kccl.Timeout, match=r"peer 1 did not arrive; .*heard it from rank 0"
            ):
                comm.all_reduce(floats(nbytes))
                comm.barrier()
        comm.timeout = 20
        comm.reset()
        comm.all_reduce(floats(nbytes))

    kccl.run_threads(main, 2)


def test_ranks_that_make_the_same_calls_in_other_ways_agree():
    """Prepared or not, in place or not, known or not: in one call these may differ."""

    def main(comm):
        x = np.arange(6, dtype=np.float32)
        prepared = [comm.all_reduce.prepare(x.copy()) for _ in range(2)]
        for number in range(60):
            way = (number + comm.rank) % 4
            if way == 0:
                y = comm.all_reduce(x.copy())
            elif way == 1:
                y = comm.all_reduce(x, out=np.empty_like(x))
            elif way == 2:
                y = comm.all_reduce.prepare(x.copy())()
            else:
                y = prepared[number % 2]()
            assert y.shape == x.shape
            if number % 3 == 0:
                comm.barrier() if comm.rank else comm.barrier.prepare()()
            if number % 5 == 0:
                comm.broadcast(x.copy() if comm.rank else array("f", x), root=number % 3)
            if number % 7 == comm.rank:
                time.sleep(0.012)

    kccl.run_threads(main, 3)


def test_the_same_calls_agree_whatever_came_before():
    """Descriptions of earlier calls of either parity are not compared."""

    def main(comm):
        for number in range(40):
            comm.all_reduce(floats((4 + number % 7) * KIB))
            if number % 3 == 0:
                comm.all_reduce(floats(8))
            if number % 5 == 0:
                comm.broadcast(floats((1 + number) * KIB), root=number % 3)
            comm.all_gather(floats((2 + number % 4) * KIB))
            if number % 4 == 0:
                comm.barrier()

    kccl.run_threads(main, 3)


def test_processes_that_share_an_array_in_place_are_told():
    program = """
import mmap, os
comm = kccl.init()
path = comm.gather_objects(f"/dev/shm/same-array-{os.getpid()}")[0]
def mapped():
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 8192), np.float32)
if comm.rank == 0:
    with open(path, "wb") as file:
        file.truncate(8192)
comm.barrier()
x = mapped()
comm.barrier()
if comm.rank == 0:
    os.unlink(path)
told = []
prepared = lambda x: comm.all_reduce.prepare(x)()
for call, begin in ((comm.all_reduce, 0), (prepared, 0), (comm.all_reduce, 100 * comm.rank)):
    try:
        call(x[begin:][:1000])
    except kccl.InvalidArgument as error:
        told.append(str(error))
# Another part for each rank, and a result of its own.
mine = x[1000 + 500 * comm.rank :][:500]
mine[:] = comm.rank
comm.all_reduce(mine)
sums = comm.all_reduce(x[:500], out=np.empty(500, np.float32))
say(rank=comm.rank, told=told, mine=mine[7].item())
"""
    code, said, errors = preloaded.run(2, program, KCCL_CHECK="1")
    assert code == 0, errors
    assert len(said) == 2, errors
    for each in said.values():
        assert each["mine"] == 1
        assert len(each["told"]) == 3, each
        for text in each["told"]:
            assert text.startswith("x of rank 0 and x of rank 1 overlap in memory"), text


def test_processes_with_unequal_arrays_both_raise():
    program = """
comm = kccl.init()
x = np.ones((1 << 22) >> comm.rank, np.float32)
try:
    for _ in range(3):
        comm.all_reduce(x)
    say(rank=comm.rank, text="no error")
except kccl.InvalidArgument as error:
    say(rank=comm.rank, text=str(error))
"""
    code, said, errors = preloaded.run(2, program)
    assert code == 0, errors
    assert len(said) == 2, errors
    for each in said.values():
        assert "16777216 bytes" in each["text"] and "8388608 bytes" in each["text"]
