"""kccl.interop.mpi: all ranks choose alike who makes a call, whatever one rank alone has given."""

import sys

import pytest
from long import long_after
from mpi_programs import PRELUDE, run, run_words
from ranks import facts

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

BOTH = pytest.mark.parametrize("library", long_after(1, ["mpich", "openmpi"]))
ONE = pytest.mark.parametrize("library", long_after(1, ["openmpi", "mpich"]))


@BOTH
def test_a_rank_whose_message_alone_is_unlike_the_others_makes_the_same_call(library):
    program = """
warm(world)
x = np.full(4, rank + 1.0)
ONE, TWO = [1.0] * 4, [2.0] * 4
whole = np.arange(8.0) + 10 * rank

def bare(array):
    "Memory of which only the address is known."
    return MPI.memory.fromaddress(array.ctypes.data, 0)

def check(name, got, wanted):
    assert got.tolist() == wanted, (name, rank, got, wanted)

got = x.copy()
world.Bcast([bare(got), 4, MPI.DOUBLE] if rank == 0 else got)
check("a buffer without a length", got, ONE)

got = np.zeros(8)
world.Allgatherv(x, [bare(got[4:]), ([4, 4], [-4, 0]), MPI.DOUBLE] if rank == 0 else got)
check("a negative displacement", got, ONE + TWO)

got = np.full(10, -1.0) if rank == 0 else None
world.Gather(x, got)
if rank == 0:
    check("a long root of Gather", got, [*ONE, -1, *TWO, -1])

got = np.full(5 if rank == 0 else 4, -1.0)
world.Scatter(whole if rank == 0 else None, got)
check("a long root of Scatter", got, [0, 1, 2, 3, -1] if rank == 0 else [4, 5, 6, 7])

got = np.full(10 if rank == 0 else 8, -1.0)
world.Allgather(x, got)
check("a long Allgather", got, [*ONE, -1, *TWO, -1] if rank == 0 else ONE + TWO)

got = np.full(10 if rank == 0 else 8, -1.0)
world.Alltoall(whole, got)
wanted = [[0, 1, 2, 3, -1, 10, 11, 12, 13, -1], [4, 5, 6, 7, 14, 15, 16, 17]]
check("a long Alltoall", got, wanted[rank])

got = np.full(9, -1.0)
counts = ([5, 4], [0, 5]) if rank == 0 else ([4, 4], [0, 4])
world.Allgatherv(x, [got, counts, MPI.DOUBLE])
check("a long own part of Allgatherv", got, [*ONE, -1, *TWO] if rank == 0 else [*ONE, *TWO, -1])

if "Open MPI" in MPI.Get_library_version():
    # Its Scan takes a buffer that is given twice.
    got = x.copy()
    world.Scan(got if rank == 0 else x, got)
    check("a buffer given twice", got, [1.0] * 4 if rank == 0 else [3.0] * 4)

short = np.zeros(6) if rank == 0 else None
try:
    world.Gather(x, short)
    assert rank
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_TRUNCATE, error
world.Barrier()
say(rank=rank, linked=bool(world._link))
"""
    said, told = run(library, 2, program)
    assert [fact["linked"] for fact in said] == [True, True], told


PARTS = """
warm(world)
link, made = world._link, []
all_to_all = link.all_to_all

def counted(*arguments, **keywords):
    made.append(keywords["send_counts"])
    return all_to_all(*arguments, **keywords)

link.all_to_all = counted
mine, root = np.full(2 + rank, rank + 1.0), 1
got = np.full(8, -1.0) if rank == root else None
world.Gatherv(mine, [got, [2, 3 + 1], [0, 4], MPI.DOUBLE] if rank == root else None, root)
if rank == root:
    assert got.tolist() == [1, 1, -1, -1, 2, 2, 2, -1], got

got = np.full(5, -1.0)
sent = [np.arange(9.0), ([3, 4], [6, 0]), "d"] if rank == root else None
world.Scatterv(sent, [got, 3 + 2 * rank], root)
assert got.tolist() == [[6, 7, 8, -1, -1], [0, 1, 2, 3, -1]][rank], (rank, got)

got = np.full(4, -1.0)
sends, receives = [[1, 2], [0, 1]][rank], [[2, 0], [2, 1]][rank]
world.Alltoallv([np.arange(3.0) + 10 * rank, sends], [got, receives])
assert got.tolist() == [[0, -1, -1, -1], [1, 2, 10, -1]][rank], (rank, got)
assert len(made) == 3, made

try:
    world.Alltoallv([np.zeros(4), [2, 2]], [np.zeros(6), [2 + rank, 2]])
    said = ""
except MPI.Exception as error:
    said = str(error)
say(rank=rank, said=said)
"""


@ONE
def test_kccl_makes_calls_in_which_a_rank_knows_its_own_lengths_only(library):
    """A rank may have room for more than its own part, and of another rank's part it must have the
    length.
    """
    facts, told = run(library, 2, PARTS)
    said = {fact["rank"]: fact["said"] for fact in facts}
    assert sorted(said) == [0, 1], told
    assert "rank 1 expects 24 bytes of rank 0, which sends it 16" in said[1]


@BOTH
def test_a_message_of_the_program_that_waits_does_not_stop_mpi(library):
    program = """
warm(world)
pieces, small = np.zeros((4000, 1000), np.uint8), np.zeros(1)
if rank == 1:
    world.Send(small, 0, tag=0)
    time.sleep(0.3)
    for piece in pieces:
        world.Recv(piece, 0, tag=5)
    world.Barrier()
else:
    while not world.Iprobe(1, 0):
        pass
    requests = [world.Isend(piece, 1, tag=5) for piece in pieces]
    world.Barrier()
    MPI.Request.Waitall(requests)
    world.Recv(small, 1, tag=0)
say(rank=rank)
"""
    assert len(run(library, 2, program)[0]) == 2


@ONE
def test_a_call_that_mpi_has_begun_counts_though_it_failed_on_a_rank(library):
    program = """
caught = 0
x = np.zeros(4)
for _ in range(4):
    try:
        world.Bcast(x if rank == 0 else x[:3].copy())
    except MPI.Exception as error:
        caught += 1
    if rank == 1:
        # MPI refuses it, and the other rank does not make it.
        try:
            world.Bcast(x, 5)
        except MPI.Exception:
            pass
for _ in range(12):
    world.Barrier()
say(rank=rank, caught=caught, linked=bool(world._link))
"""
    said, told = run(library, 2, program)
    assert [fact["linked"] for fact in said] == [True, True], told
    assert sorted(fact["caught"] for fact in said) == [0, 4]


def test_a_warning_that_is_an_error_leaves_all_ranks_alike():
    program = """
import warnings
import kccl.interop.mpi_opening as opening
from kccl.base.errors import BackendError
warnings.simplefilter("error")

def refuse(*_):
    raise BackendError("no such thing")

if rank == 1:
    opening.opener = refuse
raised = []
for _ in range(20):
    try:
        world.Barrier()
    except RuntimeWarning as warning:
        raised.append(str(warning))
say(rank=rank, raised=raised, link=world._link)
"""
    said, told = run("mpich", 2, program)
    zero, one = sorted(said, key=lambda fact: fact["rank"])
    assert [zero["link"], one["link"]] == [False, False] and one["raised"] == [], told
    assert len(zero["raised"]) == 1 and zero["raised"][0].endswith("rank 1: no such thing")


def test_a_gpus_memory_is_never_read_as_the_hosts():
    program = """
from kccl.interop.mpi_messages import Message, _memory

class OnGpu:
    "MPI reads it where the address says, as MPI does."
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = dict(array.__array_interface__, version=3)

class OfDlpack:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, max_version=None, **_):
        return self.array.__dlpack__(max_version=max_version)
    def __dlpack_device__(self):
        return self.device, 0

x = np.arange(4.0)
shares = []
for device in (1, 2):
    given = OfDlpack(x)
    given.device = device
    shares.append(_memory(given, writable=False) is not None)
message = Message([OnGpu(x), 4, MPI.DOUBLE], 1, writable=False)
shares.append(np.shares_memory(message.given(), x))
say(rank=0, shares=shares, same=message.given().view(float).tolist())
"""
    ((fact,), _) = run("mpich", 1, program)
    assert fact["shares"] == [True, False, False] and fact["same"] == [0, 1, 2, 3]


def test_errors_say_what_a_program_of_mpi_can_do():
    program = """
def error_of(call):
    comm = warm(world.Dup())
    try:
        call(comm)
        comm.Barrier()
    except MPI.Exception as error:
        again = warm(comm.Dup())
        total = np.empty(1)
        again.Allreduce(np.ones(1), total)
        return [error.Get_error_class(), str(error), total[0]]

x, y = np.ones(4), np.empty(4)
say(rank=rank, classes=[MPI.ERR_TRUNCATE, MPI.ERR_ARG],
    lengths=error_of(lambda comm: comm.Bcast(np.empty(40 + rank))),
    ops=error_of(lambda comm: comm.Allreduce(x, y, MPI.MAX if rank else MPI.MIN)))
"""
    said, told = run("mpich", 2, program)
    assert len(said) == 2, told
    for fact in said:
        assert [fact["lengths"][0], fact["ops"][0]] == fact["classes"]
        for _, text, total in (fact["lengths"], fact["ops"]):
            assert "reset()" not in text and text.endswith("as what its Dup() returns")
            assert total == 2


def test_the_log_names_calls_without_docstrings_too():
    program = """
warm(world)
x = np.arange(2, dtype=np.int32)
world.Allreduce(x, np.empty(2, np.int32), MPI.LAND)
"""
    words = sys.executable, "-OO", "-c", PRELUDE + program
    told = run_words("mpich", 2, *words, KCCL_MPI="log").stderr
    assert told.count("Allreduce by MPI: an operator or a datatype") == 2, told


def test_the_end_of_a_fork_leaves_the_ranks_mpi_alone():
    program = """
import atexit
from kccl.interop import mpi_opening
warm(world)
child = os.fork()
if child == 0:
    mpi_opening.progress.leave_alone = lambda: os._exit(3)
    atexit._run_exitfuncs()
    os._exit(0)
_, status = os.waitpid(child, 0)
world.Barrier()
say(rank=rank, code=os.waitstatus_to_exitcode(status))
"""
    done = run_words("mpich", 2, sys.executable, "-c", PRELUDE + program)
    assert [fact["code"] for fact in facts(done.stdout)] == [0, 0], done.stderr
