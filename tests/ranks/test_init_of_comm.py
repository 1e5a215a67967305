"""kccl.init(comm=...): the ranks of a communicator that a program made with mpi4py."""

import subprocess
import sys

import pytest
from mpi_nodes import launcher
from ranks import PRELUDE, environment, facts

import kccl
from kccl.base.errors import InvalidArgument

PRELUDE += "from mpi4py import MPI\nimport numpy as np\nworld = MPI.COMM_WORLD\n"


def of_mpirun(library, world_size, program, **variables):
    """What the ranks of a program said, and how mpirun ended."""
    start, needed = launcher(library, world_size)
    done = subprocess.run(
        [*map(str, start), sys.executable, "-c", PRELUDE + program],
        env=environment(**needed, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, facts(done.stdout), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_parts_of_the_world_in_another_order(library):
    """Both halves, each backwards, beside all ranks; then what mpi4py made is used as before."""
    program = """
rank = world.Get_rank()
half = world.Split(rank % 2, -rank)
with kccl.init(comm=half) as ours, kccl.init(comm=world) as everyone:
    x, y = np.array([rank], np.int64), np.array([rank], np.int64)
    ours.all_reduce(x)
    everyone.all_reduce(y)
    gathered = ours.all_gather(np.array([rank])).ravel().tolist()
    pair = ours.split(0)
    say(rank=rank, is_same=(ours.rank, ours.world_size) == (half.Get_rank(), half.Get_size()),
        sums=[int(x[0]), int(y[0])], gathered=gathered, pair=pair.world_size,
        by_mpi=half.allreduce(1), local=everyone.local_rank, own=ours.local_rank)
half.Free()
"""
    code, said, told = of_mpirun(library, 4, program)
    assert code == 0 and len(said) == 4, told
    for fact in said:
        half = [2, 0] if fact["rank"] % 2 == 0 else [3, 1]
        assert fact["is_same"] and fact["sums"] == [sum(half), 6]
        assert fact["gathered"] == half
        assert fact["pair"] == fact["by_mpi"] == 2
        # A GPU is chosen by the place among all processes of the machine.
        assert fact["local"] == fact["own"] == fact["rank"]


def test_a_part_only_whose_others_do_not_take_part():
    program = """
rank = world.Get_rank()
part = world.Split(0 if rank else MPI.UNDEFINED, rank)
if rank:
    with kccl.init(comm=part) as comm:
        say(rank=rank, total=int(comm.all_reduce(np.array([rank]))[0]))
else:
    try:
        kccl.init(comm=part)
    except kccl.InvalidArgument as error:
        say(rank=rank, message=str(error))
world.Barrier()
"""
    code, said, told = of_mpirun("mpich", 3, program)
    assert code == 0, told
    assert {fact["rank"]: fact.get("total") for fact in said} == {0: None, 1: 3, 2: 3}
    (message,) = (fact["message"] for fact in said if "message" in fact)
    assert message == "comm is MPI.COMM_NULL, must be an intracommunicator of mpi4py"


def test_a_rank_that_has_ended_is_named_as_in_the_communicator():
    program = """
rank = world.Get_rank()
part = world.Split(rank > 0, -rank)
if rank > 1:
    try:
        kccl.init(comm=part)
    except kccl.PeerLost as error:
        say(rank=rank, message=str(error))
"""
    code, said, told = of_mpirun("mpich", 4, program)
    assert code == 0 and {fact["rank"] for fact in said} == {2, 3}, told
    for fact in said:
        own = {3: 0, 2: 1}[fact["rank"]]
        assert f"rank {own} lost rank 2 at start-up: it ended" in fact["message"]


def test_a_rank_that_ends_after_one_call_is_named_in_the_next():
    program = """
rank = world.Get_rank()
part = world.Split(rank > 0, rank)
kccl.init(comm=part).close()
if rank == 2:
    try:
        kccl.init(comm=part)
    except kccl.PeerLost as error:
        say(rank=rank, message=str(error))
"""
    code, said, told = of_mpirun("mpich", 3, program)
    assert code == 0, told
    assert [fact["rank"] for fact in said] == [2], told
    assert "rank 1 lost rank 0 at start-up: it ended" in said[0]["message"]


def test_a_wrong_variable_of_one_rank_is_an_error_on_all_of_the_communicator():
    program = """
rank = world.Get_rank()
part = world.Split(rank > 0, rank)
if rank == 2:
    os.environ["KCCL_TIMEOUT"] = "soon"
try:
    kccl.init(comm=part).close()
    say(rank=rank)
except kccl.InvalidArgument as error:
    say(rank=rank, message=str(error))
"""
    code, said, told = of_mpirun("mpich", 3, program)
    assert code == 0 and len(said) == 3, told
    for fact in said:
        assert ("KCCL_TIMEOUT" in fact.get("message", "")) == (fact["rank"] > 0)


def test_several_nodes_need_the_whole_world():
    program = """
part = world.Split(0, -world.Get_rank())
try:
    kccl.init(comm=part)
except kccl.BackendError as error:
    say(rank=world.Get_rank(), message=str(error))
with kccl.init(comm=world.Dup()) as comm:
    say(rank=comm.rank, total=int(comm.all_reduce(np.array([1]))[0]), nodes=comm.num_nodes)
"""
    code, said, told = of_mpirun("mpich", 2, program, KCCL_RANKS_PER_NODE="1")
    assert code == 0 and len(said) == 4, told
    for fact in said:
        if "total" in fact:
            assert (fact["total"], fact["nodes"]) == (2, 2)
        else:
            assert "must then be all ranks of MPI.COMM_WORLD in their order" in fact["message"]


def test_a_program_without_a_launcher_has_communicators_too():
    program = """
with kccl.init(comm=MPI.COMM_SELF) as comm:
    say(rank=comm.rank, size=comm.world_size)
"""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env={k: v for k, v in environment().items() if not k.startswith(("PMI", "OMPI"))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert facts(done.stdout) == [{"rank": 0, "size": 1}], done.stderr


@pytest.mark.parametrize("given", [0, "world", [1, 2], object])
def test_what_is_no_communicator(given):
    with pytest.raises(InvalidArgument, match=r"comm is .* must be an intracommunicator of mpi4py"):
        kccl.init(comm=given)
