"""kccl.interop.mpi: programs of mpi4py that change one import."""

import subprocess
import sys
from collections.abc import Mapping

import pytest
from long import long_after
from mpi_nodes import WORKERS, launcher
from mpi_programs import PRELUDE, run, run_words
from ranks import environment, facts

pytest.importorskip("mpi4py", reason="mpi4py is not installed")


@pytest.mark.parametrize(
    ("library", "world_size"),
    long_after(1, [("mpich", 2), ("openmpi", 2), ("mpich", 3), ("openmpi", 3)]),
)
def test_every_call_has_mpi4pys_result(library, world_size):
    done = run_words(library, world_size, sys.executable, WORKERS / "mpi_calls.py")
    assert (done.returncode, done.stdout.count("right")) == (0, world_size), (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_a_message_arrives_while_its_receiver_is_in_a_collective(library):
    """MPI matches a synchronous message only within calls of rank 0, which receives it."""
    program = """
warm(world)
x, total = np.full(100_000, rank + 1.0), np.empty(1)
if rank == 0:
    request = world.Irecv(x, 1)
    world.Allreduce(np.ones(1), total)
    request.Wait()
else:
    time.sleep(0.3)
    world.Ssend(x, 0)
    world.Allreduce(np.ones(1), total)
say(rank=rank, total=total[0], got=x[-1])
"""
    said, _ = run(library, 2, program)
    assert [(fact["total"], fact["got"]) for fact in said] == [(2, 2)] * 2


@pytest.mark.parametrize("library", long_after(1, ["mpich", "openmpi"]))
def test_wrong_arguments_raise_what_mpi4py_raises(library):
    program = """
from mpi4py import MPI as THEIRS
warm(world)
x, y = np.arange(4.0), np.empty(4)
whole = np.empty(4 * world.size)
fixed = np.empty(4)
fixed.flags.writeable = False
WRONG = [
    ("Allreduce", x, x), ("Allreduce", x, y[:2]), ("Allreduce", x, y.astype("f4")),
    ("Allreduce", x, fixed), ("Allreduce", x, whole[::2]), ("Allreduce", x, y, MPI.BAND),
    ("Allreduce", x, y, "sum"), ("Allreduce", x, [y, MPI.DOUBLE, 1, 2, 3]),
    ("Allreduce", [x, MPI.DOUBLE], [y, -1, MPI.DOUBLE]), ("Allreduce", x, [y, "no type"]),
    ("Allreduce", x, None), ("Allreduce", 3, y), ("Allreduce", x.astype(object), y),
    ("Allreduce", x.astype(">f8"), y.astype(">f8")), ("Allreduce", x.astype("M8[s]"), y),
    ("Bcast", x, 9), ("Bcast", x, -1), ("Bcast", x, 0, 1, 2), ("Bcast", {}),
    ("Reduce", x, x, MPI.SUM, 7), ("Reduce", 3, y), ("Gather", x, whole, 5), ("Gather", "x", whole),
    ("Scatter", whole, x, -4), ("Allgather", x, whole[:-1]),
    ("Alltoall", whole[:3], whole[:3]), ("Allgatherv", x, [whole, [4], MPI.DOUBLE]),
    ("Reduce_scatter", whole, y, [1] * world.size), ("Reduce_scatter_block", whole, y[:3]),
    ("Barrier", 1), ("Scan", x, y[:1]), ("Exscan", x, y, MPI.BOR),
]
for name, *arguments in WRONG:
    told = []
    for comm in (world, THEIRS.COMM_WORLD):
        try:
            getattr(comm, name)(*arguments)
            told.append("nothing")
        except MPI.Exception as error:
            told.append(error.Get_error_class())
        except Exception as error:
            told.append([type(error).__name__, str(error).partition("(")[0].split(".")[-1]])
    if told[0] != told[1] or told[1] == "nothing":
        say(rank=rank, name=name, arguments=repr(arguments), told=told)
x[:] = 1
world.Allreduce(x, y)
say(rank=rank, total=y.tolist(), linked=bool(world._link))
"""
    said, told = run(library, 2, program)
    # Nothing was sent, so the next call is right.
    assert [fact for fact in said if "total" not in fact] == [], told
    assert [fact["total"] for fact in said] == [[2] * 4] * 2
    assert all(fact["linked"] for fact in said)


@pytest.mark.parametrize("library", long_after(1, ["mpich", "openmpi"]))
def test_communicators_are_this_modules_where_mpi4py_makes_intracommunicators(library):
    program = """
x = np.empty(1)

def total(comm):
    warm(comm).Allreduce(np.ones(1), x)
    assert type(comm) is MPI.Intracomm and comm._link, comm
    return int(x[0])

everyone = world.Get_group()
half = world.Split(rank % 2, -rank)
some = world.Create_group(everyone.Incl([0, 2])) if rank != 1 else None
none = world.Split(0 if rank else MPI.UNDEFINED)
made = world.Create(everyone.Incl([1, 2]))
cart = world.Create_cart([3])
facts = dict(
    world=total(world), dup=total(world.Dup()), clone=total(world.Clone()),
    shared=total(world.Split_type(MPI.COMM_TYPE_SHARED)),
    some=total(some) if some else None, made=total(made) if made else None,
    null=[none == MPI.COMM_NULL, made == MPI.COMM_NULL],
    is_cart=[type(cart).__name__, isinstance(cart, MPI.Intracomm),
             issubclass(MPI.Cartcomm, MPI.Intracomm)],
    half=[half.Get_size(), half.rank],
)
# Another object of the same communicator.
alias = MPI.Intracomm(half)
if half.size > 1:
    warm(half)
    alias.Barrier()
    facts["same"] = alias._link is half._link and alias == half
    comm = half._link.comm
    half.Free()
    try:
        comm.barrier()
    except kccl.Error as error:
        facts["freed"] = [str(error), half == MPI.COMM_NULL]
idle, request = world.Idup()
request.Wait()
facts["idup"] = total(idle)

class Own(MPI.Intracomm):
    def __new__(cls, comm=None):
        return super().__new__(cls, comm)

own = warm(Own(world))
own.Allreduce(np.ones(1), x)
facts["own"] = [type(own.Dup()).__name__, x[0], bool(own._link)]
say(rank=rank, **facts)
MPI.Finalize()
"""
    said, told = run(library, 3, program)
    assert len(said) == 3, told
    for fact in sorted(said, key=lambda fact: fact["rank"]):
        rank = fact["rank"]
        for name in ("world", "dup", "clone", "shared", "idup"):
            assert fact[name] == 3, name
        assert fact["some"] == (None if rank == 1 else 2)
        assert fact["made"] == (2 if rank else None)
        assert fact["null"] == [rank == 0, rank == 0]
        assert fact["is_cart"] == ["Cartcomm", True, True]
        assert fact["half"] == [[2, 1], [1, 0], [2, 0]][rank]
        assert fact["own"] == ["Own", 3, True]
        if rank != 1:
            assert fact["same"]
            assert "is closed" in fact["freed"][0] and fact["freed"][1]


def test_every_name_of_mpi4py_is_there():
    program = """
import mpi4py.MPI
from kccl.interop import mpi
theirs = {name: value for name, value in vars(mpi4py.MPI).items() if not name.startswith("__")}
other = [name for name, value in theirs.items() if getattr(mpi, name) is not value]
found = {}
exec("from kccl.interop.mpi import *", found)
say(rank=0, other=other, missing=[n for n in theirs if n[0] != "_" and n not in found],
    is_subclass=issubclass(mpi.Intracomm, mpi4py.MPI.Intracomm),
    same=mpi.COMM_WORLD == mpi4py.MPI.COMM_WORLD)
"""
    ((fact,), _) = run("mpich", 1, program)
    assert sorted(fact["other"]) == ["COMM_SELF", "COMM_WORLD", "Intracomm"]
    assert fact["missing"] == [] and fact["is_subclass"] and fact["same"]


def test_a_call_that_fails_on_one_rank_does_not_count():
    """Ranks that counted differently would not begin with KCCL in the same call."""
    program = """
x = np.full(2, rank + 1.0)
for _ in range(20):
    if rank == 1:
        for wrong in (lambda: world.Bcast("no buffer"), lambda: world.Allreduce(x, x[:1])):
            try:
                wrong()
            except (TypeError, ValueError):
                pass
    y = np.empty(2)
    world.Allreduce(x, y)
    assert y[0] == 3
say(rank=rank, linked=bool(world._link))
"""
    said, told = run("mpich", 2, program)
    assert [fact["linked"] for fact in said] == [True, True], told


def test_the_worlds_objects_are_constants():
    program = """
import copy, pickle
for constant in (MPI.COMM_WORLD, MPI.COMM_SELF):
    for again in (pickle.loads(pickle.dumps(constant)), copy.copy(constant),
                  MPI.Intracomm.fromhandle(constant.handle), MPI.Intracomm.f2py(constant.py2f())):
        assert again is constant, again
    constant.free()
    assert constant != MPI.COMM_NULL
part = world.Split(0)
assert type(MPI.Intracomm.fromhandle(part.handle)) is MPI.Intracomm
try:
    world.Free()
except MPI.Exception as error:
    say(rank=rank, code=error.Get_error_class() == MPI.ERR_COMM, shown=repr(MPI.Intracomm),
        total=world.allreduce(1))
"""
    said, told = run("mpich", 2, program)
    assert len(said) == 2, told
    for fact in said:
        assert fact["code"] and fact["shown"] == "<class 'kccl.interop.mpi.Intracomm'>"
        assert fact["total"] == 2


def test_a_lost_rank_is_named_and_an_exception_of_mpi():
    program = """
warm(world)
if rank == 1:
    os._exit(0)
try:
    world.Allreduce(np.ones(1), np.empty(1))
except MPI.Exception as error:
    import pickle
    again = pickle.loads(pickle.dumps(error))
    say(rank=rank, kinds=[isinstance(each, kccl.PeerLost) for each in (error, again)],
        text=str(error), same=str(again) == str(error), peer=error.peer,
        code=error.Get_error_class() == MPI.ERR_PROC_FAILED,
        told=error.Get_error_string() == str(error), shown=repr(error))
os._exit(0)
"""
    start, needed = launcher("openmpi", 2)
    done = subprocess.run(
        [*map(str, start), sys.executable, "-c", PRELUDE + program],
        env=environment(**needed),
        capture_output=True,
        text=True,
        timeout=60,
    )
    ((fact),) = facts(done.stdout)
    assert fact["kinds"] == [True, True] and fact["same"] and fact["code"] and fact["told"]
    assert fact["peer"] == 1 and "the process of peer 1 has ended" in fact["text"]
    assert fact["shown"].startswith("PeerLost(")


def test_calls_that_differ_are_an_error_of_mpi_on_all_ranks():
    program = """
warm(world)
try:
    world.Bcast(np.empty(40_000 + rank))
    world.Barrier()
except MPI.Exception as error:
    say(rank=rank, code=error.Get_error_class() == MPI.ERR_TRUNCATE, text=str(error))
os._exit(0)
"""
    said, _ = run("mpich", 2, program)
    assert len(said) == 2 and all(fact["code"] for fact in said)
    assert all("disagree" in fact["text"] for fact in said)


REASONS: Mapping[str, tuple[str, dict[str, str], str]] = {
    "off": ("", {"KCCL_MPI": "off"}, ""),
    "off on one rank": (
        "os.environ.update({'KCCL_MPI': 'off'} if os.environ['PMI_RANK'] == '1' else {})",
        {"KCCL_MPI": "log"},
        "all calls by MPI: KCCL_MPI is off (rank 1)",
    ),
    "several nodes": (
        "",
        {"KCCL_MPI": "log", "KCCL_RANKS_PER_NODE": "1"},
        "all calls by MPI: KCCL_RANKS_PER_NODE is set",
    ),
    "several machines": (
        "import kccl.ranks.job as j; own = j.machine_id()\n"
        "j.machine_id = lambda: own + os.environ['PMI_RANK']",
        {"KCCL_MPI": "log"},
        "all calls by MPI: its ranks are on several machines",
    ),
    "thread level": (
        "import mpi4py; mpi4py.rc.thread_level = 'serialized'",
        {"KCCL_MPI": "log"},
        "all calls by MPI: MPI has a thread level below MPI_THREAD_MULTIPLE",
    ),
    "namespaces of one rank": (
        "os.environ.update({'KCCL_NAMESPACES': 'a b c'} if os.environ['PMI_RANK'] == '1' else {})",
        {},
        "RuntimeWarning: kccl.interop.mpi leaves the calls of a communicator of 2 ranks to MPI: "
        "this rank is in another network and process and user namespace",
    ),
    "an error that is not KCCL's": (
        "import kccl.backends.openers as o\n"
        "if os.environ['PMI_RANK'] == '1': o.opener = lambda *_: open('/no such file')",
        {},
        "start-up failed on rank 1: [Errno 2] No such file",
    ),
    "no descriptors": (
        "import kccl.start as s\nif os.environ['PMI_RANK'] == '1': s._OF_A_PEER = 1 << 20",
        {},
        "RuntimeWarning: kccl.interop.mpi leaves the calls of a communicator of 2 ranks to MPI: "
        "start-up failed on rank 1",
    ),
}


@pytest.mark.parametrize("why", long_after(4, REASONS))
def test_all_ranks_leave_a_communicator_to_mpi_together(why):
    before, variables, told = REASONS[why]
    program = """
for _ in range(20):
    world.Barrier()
total = np.empty(1)
world.Allreduce(np.ones(1), total)
say(rank=rank, link=world._link, total=total[0])
"""
    start, needed = launcher("mpich", 2)
    head, tail = PRELUDE.split("from kccl.interop", 1)
    done = subprocess.run(
        [
            *map(str, start),
            sys.executable,
            "-c",
            f"{head}\n{before}\nfrom kccl.interop{tail}{program}",
        ],
        env=environment(**needed) | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = facts(done.stdout)
    assert [(fact["link"], fact["total"]) for fact in said] == [(False, 2)] * 2, done.stderr
    assert told in done.stderr and done.stderr.count("kccl.interop.mpi") == (1 if told else 0)


def test_the_log_says_once_why_mpi_makes_a_call():
    program = """
warm(world)
x, y = np.arange(2, dtype=np.int32), np.empty(2, np.int32)
for _ in range(3):
    world.Allreduce(x, y, MPI.LAND)
"""
    _, told = run("mpich", 2, program, KCCL_MPI="log")
    why = "Allreduce by MPI: an operator or a datatype that KCCL does not reduce"
    # mpirun may print the lines of two ranks as one.
    for line in (f"rank 0: {why}", f"rank 1: {why}", "rank 0: calls by KCCL"):
        assert told.count(f"kccl.interop.mpi: communicator of 2 ranks, {line}") == 1, told
    assert told.count("kccl.interop.mpi") == 3, told


@pytest.mark.long
def test_a_rank_may_come_later_than_kccls_limits():
    program = """
world.Barrier()
for _ in range(20):
    world.Barrier()
if rank == 1:
    time.sleep(1.5)
world.Barrier()
say(rank=rank, limit=world._link.comm.timeout)
"""
    said, _ = run("mpich", 2, program.replace("1.5", "0"), KCCL_TIMEOUT="7")
    assert [fact["limit"] for fact in said] == [7, 7]
    start, needed = launcher("mpich", 2)
    env = environment(**needed)
    del env["KCCL_TIMEOUT"], env["KCCL_FIRST_TIMEOUT"]
    done = subprocess.run(
        [*map(str, start), sys.executable, "-c", PRELUDE + program],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [fact["limit"] > 1e7 for fact in facts(done.stdout)] == [True, True], done.stderr
