"""Ranks on several nodes, which KCCL_RANKS_PER_NODE makes of one machine."""

import pytest
from long import long_after
from mpi_nodes import run, run_worker
from ranks import AT_ONCE, start
from ranks import run as kccl_run

import kccl
from kccl.ranks import mpi
from kccl.ranks.nodes import Home, homes_of

BOTH = pytest.mark.parametrize("library", long_after(1, ["mpich", "openmpi"]))
# A survivor does not wait for the lost one in MPI_Finalize.
END = """
comm.close()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("library", "world_size", "per_node"),
    long_after(1, [("mpich", 3, 1), ("mpich", 4, 2), ("openmpi", 4, 2), ("mpich", 5, 2)]),
)
def test_every_collective(library, world_size, per_node):
    run_worker(library, world_size, per_node)


# World size and ranks of a node, each under one of the two.
PLACES = [(2, 1), (5, 4), (8, 3)]


# Open MPI's ranks spin: eight on two cores take their time.
@pytest.mark.long
@pytest.mark.takes(30)
@pytest.mark.parametrize(
    ("library", "world_size", "per_node"),
    [(("mpich", "openmpi")[i % 2], *place) for i, place in enumerate(PLACES)],
)
def test_every_size_and_type(library, world_size, per_node):
    run_worker(library, world_size, per_node, "types")


def test_a_job_has_nodes_where_machines_or_the_variable_say_so():
    assert homes_of(["a", "a"], 0) == () == homes_of(["a", "a"], 2)
    assert [home.node for home in homes_of(["a", "b", "a", "b"], 0)] == [0, 1, 0, 1]
    assert [home.node for home in homes_of(["a"] * 5, 2)] == [0, 0, 1, 1, 2]
    assert homes_of(["a", "b"], 8) == (Home(0, 0), Home(1, 1))
    # A machine with more ranks than a team has is several nodes.
    assert [home.node for home in homes_of(["a"] * 9 + ["b"], 0)] == [0] * 8 + [1, 2]
    with pytest.raises(kccl.InvalidArgument, match="on 9 nodes of at most 1 ranks, must be on at"):
        homes_of(["a"] * 9, 1)


@BOTH
def test_a_lost_rank_is_named_and_the_others_go_on(library, tmp_path):
    """Under MPICH the rank is a child of what mpirun watches, which would end the others. What it
    watches ends when the others are there, or after a minute.
    """
    program = f"""
folder = {str(tmp_path)!r}
if sys.argv[-1] != "rank" and {library == "mpich"}:
    import subprocess
    del os.environ["KCCL_RANK_PROCESS"]
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "rank"], close_fds=False)
    until = time.monotonic() + 60
    while len(os.listdir(folder)) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    os._exit(0)
comm = kccl.init()
x = np.ones(4, np.float32)
comm.all_reduce(x)
comm.barrier()
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    while True:
        comm.all_reduce(x)
except kccl.PeerLost as error:
    told, peer, seconds = str(error), error.peer, time.monotonic() - began
part = comm.shrink()
parts = part.split(part.node)
say(rank=comm.rank, told=told, peer=peer, seconds=seconds, node=part.node, ranks=part.world_size,
    sum=part.all_reduce(np.full(1, comm.rank + 1.0)).tolist(), neighbours=parts.world_size)
part.barrier()
part.close()
open(os.path.join(folder, str(comm.rank)), "w").close()
time.sleep(0.3)
{END}"""
    said = run(library, 4, 2, program)
    assert sorted(said) == [0, 1, 2]
    for rank, fact in said.items():
        assert fact["peer"] == 3 and "the process of peer 3 has ended" in fact["told"]
        assert fact["seconds"] < AT_ONCE
        assert (fact["node"], fact["ranks"], fact["sum"]) == (rank // 2, 3, [6.0])
        assert fact["neighbours"] == (1 if rank == 2 else 2)


@pytest.mark.long
@BOTH
def test_time_outs_calls_that_differ_and_reset(library):
    program = f"""
comm = kccl.init()
x = np.ones(1000, np.float32)
comm.all_reduce(x)
said = []

def expect(kind, call):
    try:
        call()
        said.append("nothing")
    except kind as error:
        said.append(type(error).__name__ + ": " + str(error))
    comm.timeout = 20
    comm.reset()
    assert comm.all_reduce(np.ones(1)) == [4]
    # A rank that fails in its next call would end this one on ranks that have not left it.
    comm.gather_objects(0)

comm.timeout = 0.3
expect(kccl.Timeout, comm.barrier if comm.rank != 3 else lambda: time.sleep(1.5) or comm.barrier())
expect(kccl.InvalidArgument, lambda: comm.all_reduce(x[: 500 if comm.rank > 1 else 400]))
expect(kccl.InvalidArgument, lambda: comm.broadcast(x, comm.rank // 2))
say(rank=comm.rank, said=said)
{END}"""
    said = run(library, 4, 2, program)
    assert sorted(said) == [0, 1, 2, 3]
    for rank, fact in said.items():
        late, lengths, roots = fact["said"]
        # Rank 3 may find all that the others had sent.
        assert rank == 3 or (late.startswith("Timeout") and "peer 3 did not arrive" in late)
        assert "the ranks disagree about this call" in lengths
        assert "2000 bytes" in lengths and "1600 bytes" in lengths
        assert "the ranks disagree about this call" in roots and "root" in roots


@pytest.mark.long
def test_ctrl_c_and_a_peer_that_closes():
    program = """
comm = kccl.init()
comm.barrier()
if comm.rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    if comm.rank == 1:
        time.sleep(1)
    # What rank 0 has sent is there.
    comm.barrier()
    comm.barrier()
except BaseException as error:
    said = f"{type(error).__name__}: {error}"
say(rank=comm.rank, said=said, seconds=time.monotonic() - began)
comm.close()
"""
    said = run("mpich", 2, 1, program)
    assert said[0]["said"].startswith("KeyboardInterrupt") and said[0]["seconds"] < AT_ONCE
    assert "rank 0 was interrupted" in said[1]["said"] or "rank 0 gave up" in said[1]["said"]
    program = """
comm = kccl.init()
comm.barrier()
try:
    if comm.rank == 1:
        comm.barrier()
except kccl.PeerLost as error:
    say(rank=1, said=str(error))
comm.close()
"""
    assert "peer 0 has closed" in run("mpich", 2, 1, program)[1]["said"]


def test_what_needs_one_node_says_so():
    program = """
comm = kccl.init()
x, said = np.ones(2), []
for call in (
    lambda: comm.window(64), lambda: comm.empty(3), comm.device_comm, lambda: comm.signal(0),
    comm.wait,
):
    try:
        call()
    except kccl.Error as error:
        said.append(str(error))
part = comm.split(comm.node)
window = part.window(64)
part.put(np.array([comm.rank]), 1 - part.rank, window)
part.barrier()
say(rank=comm.rank, said=said, plan=comm.plan("all_reduce", 8).explain(), name=repr(comm),
    of_peer=int(np.frombuffer(window.local, np.int64)[0]),
    objects=comm.gather_objects(comm.rank))
from kccl.backends.grouped import OnHost
OnHost.spans_nodes = False
try:
    kccl.init()
except kccl.BackendError as error:
    print(error)
"""
    said = run("mpich", 4, 2, program)
    for rank, fact in said.items():
        assert len(fact["said"]) == 5
        for told in fact["said"]:
            assert "the ranks are on 2 nodes (ranks 0, 1; 2, 3), and " in told
            assert "comm.split(comm.node)" in told
        assert "all_reduce between nodes, by MPI (2 ranks, 8 bytes)" in fact["plan"]
        assert fact["of_peer"] == rank ^ 1 and fact["objects"] == [0, 1, 2, 3]


def test_nodes_need_mpi(monkeypatch):
    program = """
try:
    kccl.init()
except kccl.Error as error:
    say(rank=int(os.environ["KCCL_RANK"]), said=str(error))
"""
    _, said, _ = kccl_run(2, program, KCCL_RANKS_PER_NODE="1")
    for fact in said.values():
        assert "KCCL_RANKS_PER_NODE is 1, and nodes exchange by MPI" in fact["said"]
        assert "mpirun" in fact["said"]
    monkeypatch.setenv("KCCL_RANKS_PER_NODE", "1")
    with pytest.raises(kccl.InvalidArgument, match="KCCL_RANKS_PER_NODE is 1, must be unset"):
        kccl.run_threads(lambda comm: None, 2)
    monkeypatch.setenv("KCCL_RANKS_PER_NODE", "9")
    with pytest.raises(kccl.InvalidArgument, match="KCCL_RANKS_PER_NODE=9 must be between 1 and 8"):
        kccl.run_threads(lambda comm: None, 2)


def test_one_rank_alone_is_one_node():
    process = start("print(kccl.init().all_reduce(np.ones(1)))", KCCL_RANKS_PER_NODE="1")
    assert process.communicate(timeout=60)[0] == "[1.]\n"


def test_a_variable_that_differs():
    program = """
rank = int(os.environ["PMI_RANK"])
os.environ["KCCL_RANKS_PER_NODE"] = str(1 + rank)
try:
    kccl.init()
except kccl.InvalidArgument as error:
    say(rank=rank, said=str(error))
"""
    said = run("mpich", 2, 1, program)
    assert "KCCL_RANKS_PER_NODE is 1 on rank 0 and 2 on rank 1" in said[0]["said"]
    assert "KCCL_RANKS_PER_NODE is 2 on rank 1 and 1 on rank 0" in said[1]["said"]


def test_tags_do_not_repeat_after_many_resets():
    """Messages of before a reset may still be in MPI's memory."""
    with pytest.raises(kccl.BackendError, match=r"can be reset 1023 times"):
        mpi.first_tag(0, 1024)
