"""send, recv, isend, irecv and group between ranks of several nodes, by MPI."""

import sys

import pytest
from long import long_after
from mpi_nodes import WORKERS, run, run_words
from ranks import AT_ONCE

BOTH = pytest.mark.parametrize("library", long_after(1, ["openmpi", "mpich"]))
END = """
comm.close()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("library", "world_size", "per_node"),
    long_after(1, [("mpich", 5, 2), ("openmpi", 4, 2), ("mpich", 3, 1)]),
)
def test_everything(library, world_size, per_node):
    words = sys.executable, WORKERS / "messages.py", 1
    code, out, err = run_words(library, world_size, per_node, *words)
    assert (code, out.count("right")) == (0, world_size), out + err


@pytest.mark.long
@BOTH
def test_a_lost_rank_is_named_and_the_others_go_on(library, tmp_path):
    """Ranks 1 and 2 of nodes of two are in no team together. See test_nodes.py for MPICH's."""
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
comm.barrier()
x = np.zeros(1)
if comm.rank == 2:
    comm.send(np.full(1, 5.0), 1)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    if comm.rank == 1:
        assert comm.recv(x, 2) == [5]
    comm.recv(x, 2)
except kccl.PeerLost as error:
    told, peer, seconds = str(error), error.peer, time.monotonic() - began
part = comm.shrink()
took = np.zeros(1)
with part.group():
    part.send(np.full(1, float(part.rank)), (part.rank + 1) % 3)
    part.recv(took)
say(rank=comm.rank, told=told, peer=peer, seconds=seconds, took=took.tolist())
part.barrier()
open(os.path.join(folder, str(comm.rank)), "w").close()
time.sleep(0.3)
{END}"""
    said = run(library, 4, 2, program)
    assert sorted(said) == [0, 1, 3]
    for number, fact in enumerate(said[rank] for rank in sorted(said)):
        assert fact["peer"] == 2 and "the process of peer 2 has ended" in fact["told"]
        assert fact["seconds"] < AT_ONCE and fact["took"] == [(number - 1) % 3]


@pytest.mark.long
@BOTH
def test_time_outs_lengths_that_differ_and_reset(library):
    program = f"""
comm = kccl.init()
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
    comm.gather_objects(0)

# Ranks 1 and 2 are in no team together.
comm.timeout = 0.3 if comm.rank == 1 else 20
expect(kccl.Error, lambda: comm.recv(np.zeros(1), 3 - comm.rank if comm.rank in (1, 2) else 1))
if comm.rank == 2:
    comm.send(np.zeros(3), 1, tag=9)
    comm.send(np.zeros(3), 1, tag=8)
expect(kccl.Error, lambda: comm.recv(np.zeros(4), 2, 8) if comm.rank == 1 else comm.barrier())
# What is sent without a receiver is bounded.
def fill():
    for number in range(100):
        comm.send(np.full(1000, float(number)), 1)
comm.timeout = 1 if comm.rank == 2 else 20
expect(kccl.Error, fill if comm.rank == 2 else comm.barrier)
x = np.zeros(2)
if comm.rank == 2:
    comm.send(np.ones(2), 1)
if comm.rank == 1:
    comm.recv(x)
say(rank=comm.rank, said=said, x=x.tolist())
comm.gather_objects(0)
{END}"""
    said = run(library, 4, 2, program)
    assert sorted(said) == [0, 1, 2, 3]
    assert said[1]["x"] == [1, 1]
    for rank, fact in said.items():
        late, lengths, full = fact["said"]
        assert "peer 2 did not arrive; rank 1 waited for peer 2" in late
        assert late.startswith("Timeout") and ("heard it from rank 1" in late) == (rank != 1)
        assert "rank 1: recv, 32 bytes; rank 2: send, 24 bytes; all ranks may" in lengths
        assert "steps of their calls" not in lengths
        assert full.startswith("Timeout") and "send on tag 0: peer 1 did not arrive" in full


@pytest.mark.long
def test_ctrl_c_and_a_sender_that_closes():
    program = """
comm = kccl.init()
comm.barrier()
x = np.zeros(1)
said = "nothing"
began = time.monotonic()
if comm.rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    comm.recv(x, 1 - comm.rank)
except BaseException as error:
    said = f"{type(error).__name__}: {error}"
say(rank=comm.rank, said=said, seconds=time.monotonic() - began)
comm.close()
"""
    said = run("mpich", 2, 1, program)
    assert said[0]["said"].startswith("KeyboardInterrupt") and said[0]["seconds"] < AT_ONCE
    assert "rank 0 was interrupted" in said[1]["said"]
    program = """
comm = kccl.init()
comm.barrier()
if comm.rank == 0:
    comm.send(np.full(1, 7.0), 1)
    comm.close()
else:
    time.sleep(0.5)
    x = np.zeros(1)
    comm.recv(x, 0)
    try:
        comm.recv(x, 0)
    except kccl.PeerLost as error:
        say(rank=1, said=str(error), x=x.tolist())
    comm.close()
"""
    said = run("mpich", 2, 1, program)
    assert "peer 0 has closed" in said[1]["said"] and said[1]["x"] == [7]


@BOTH
def test_mpi_may_be_finalized_before_a_communicator_is_closed(library):
    program = """
import numpy as np
from mpi4py import MPI
comm = kccl.init()
x = np.zeros(4)
if comm.rank == 0:
    comm.send(x, 1)
else:
    comm.recv(x, 0)
comm.barrier()
MPI.Finalize()
if comm.rank == 0:
    comm.close()
say(rank=comm.rank)
"""
    said = run(library, 2, 1, program)
    assert sorted(said) == [0, 1]
