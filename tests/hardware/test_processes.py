"""Ranks that are processes: windows shared between them, and ranks that are late or killed."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from gpu_ranks import PRELUDE, ranks
from preloaded import run
from ranks import Job

GUIDE = Path(__file__).parents[2] / "kccl/interop/README.md"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "variables", [{}, {"KCCL_CHECK": "1"}, {"KCCL_WINDOWS": "ipc"}], ids=["", "checked", "ipc"]
)
def test_collectives(world_size, variables):
    program = """
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    x = filled(dtype=dtype)
    comm.all_reduce(x)
    assert (x == total).all()
comm.broadcast(x, root=comm.world_size - 1)
comm.barrier()
window = comm.window(4096)
peer = (comm.rank + 1) % comm.world_size
comm.put(filled(16), peer, window)
comm.signal(peer)
comm.wait()
mine = torch.from_dlpack(window.array((16,), kccl.float32))
assert (mine == (comm.rank - 1) % comm.world_size + 1).all()
comm.check()
part = comm.split(comm.rank % 2)
x = filled()
part.all_reduce(x)
assert (x == sum(r + 1 for r in range(comm.rank % 2, comm.world_size, 2))).all()
part.close()
comm.close()
say(rank=comm.rank)
"""
    ranks(world_size, program, **variables)


@pytest.mark.parametrize("world_size", [2])
def test_the_guides_python_block_for_gpus(world_size):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "torch.cuda.graph" in block and "import kccl" in block)
    # The sum of two ones, twice: at once and by the graph.
    code, facts, err = run(world_size, f"{block}assert (x == 4).all()\nsay(rank=comm.rank)\n")
    assert code == 0 and len(facts) == world_size, err


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_does_not_come(world_size):
    facts = ranks(world_size, """
x = filled()
comm.all_reduce(x)
torch.cuda.synchronize()
comm.timeout = 0.3
error = None
if comm.rank != 1:
    comm.all_reduce(x)
    torch.cuda.synchronize()
    try:
        comm.check()
    except kccl.Timeout as caught:
        error = caught
    assert error is not None
else:
    time.sleep(1.5)
    try:
        # The others' words of the first call are there: it ends well.
        for _ in range(2):
            comm.all_reduce(x)
            torch.cuda.synchronize()
            comm.check()
    except kccl.Timeout as caught:
        error = caught
comm.timeout = 30
comm.reset()
x = filled()
comm.all_reduce(x)
assert (x == total).all()
comm.check()
say(rank=comm.rank, error=str(error), peer=error.peer, seen=error.epoch_seen,
    wanted=error.epoch_wanted, waited=error.waited_s)
""")  # fmt: skip
    for fact in facts.values():
        assert "all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive" in fact["error"]
        assert fact["peer"] == 1 and (fact["seen"], fact["wanted"]) == (0, 2)
        assert 0.3 < fact["waited"] < 0.5


@pytest.mark.parametrize("world_size", [2])
def test_the_limit_changes_while_a_kernel_waits(world_size):
    facts = ranks(world_size, """
comm.barrier()
torch.cuda.synchronize()
waited = 0
if comm.rank == 0:
    comm.timeout = 300
    began = time.monotonic()
    comm.barrier()
    time.sleep(0.5)
    comm.check()
    comm.timeout = 0.7
    torch.cuda.synchronize()
    waited = time.monotonic() - began
    try:
        comm.check()
        raise AssertionError("no time-out")
    except kccl.Timeout:
        pass
else:
    time.sleep(3)
say(rank=comm.rank, waited=waited)
""")  # fmt: skip
    assert 0.5 < facts[0]["waited"] < 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_is_killed(world_size):
    program = (
        PRELUDE
        + """
x = filled()
comm.all_reduce(x)
torch.cuda.synchronize()
say(rank=comm.rank)
if comm.rank == 1:
    time.sleep(60)
began = time.monotonic()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(5):
        comm.all_reduce(x)
graph.replay()
torch.cuda.synchronize()
waited = time.monotonic() - began
try:
    comm.check()
    raise AssertionError("no error")
except kccl.PeerLost as error:
    lost = error
smaller = comm.shrink()
y = filled()
smaller.all_reduce(y)
assert (y == total - 2).all()
smaller.check()
say(rank=comm.rank, error=str(lost), peer=lost.peer, waited=waited, world_size=smaller.world_size)
"""
    )
    with Job(world_size, program) as job:
        job.wait_for(world_size)
        pid = job.rank_pids()[1]
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        _, facts, err = job.end()
    assert set(facts) == set(range(world_size)) - {1}, err
    for fact in facts.values():
        assert "the process of peer 1 has ended" in fact["error"]
        assert fact["peer"] == 1 and fact["waited"] < 5
        assert fact["world_size"] == world_size - 1


@pytest.mark.parametrize("world_size", [2])
def test_a_rank_that_is_killed_with_ipc_windows(world_size):
    """The survivor's GPU context may be lost. The error must be right in either case."""
    program = (
        PRELUDE
        + """
x = filled()
comm.all_reduce(x)
torch.cuda.synchronize()
say(rank=comm.rank)
if comm.rank == 1:
    time.sleep(60)
error = None
try:
    comm.all_reduce(x)
    torch.cuda.synchronize()
    comm.check()
except kccl.PeerLost as caught:
    error = str(caught)
say(rank=comm.rank, error=error)
"""
    )
    with Job(world_size, program, KCCL_WINDOWS="ipc") as job:
        job.wait_for(world_size)
        pid = job.rank_pids()[1]
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        _, facts, err = job.end()
    assert "the process of peer 1 has ended" in facts[0]["error"], err
    assert "not guaranteed that a survivor's GPU context outlives a lost peer" in facts[0]["error"]


@pytest.mark.parametrize("world_size", [2])
def test_a_rank_that_closes_or_raises(world_size):
    facts = ranks(world_size, """
comm.barrier()
if comm.rank == 1:
    comm.close()
    say(rank=1)
    time.sleep(2)
    os._exit(0)
x = filled()
comm.all_reduce(x)
torch.cuda.synchronize()
try:
    comm.all_reduce(x)
except kccl.PeerLost as error:
    say(rank=0, error=str(error))
""")  # fmt: skip
    assert "peer 1 has closed or dropped the communicator" in facts[0]["error"]


@pytest.mark.parametrize("world_size", [2])
def test_a_fork_may_not_use_it(world_size):
    ranks(world_size, """
x = filled()
comm.all_reduce(x)
torch.cuda.synchronize()
pid = os.fork()
if pid == 0:
    try:
        comm.barrier()
    except kccl.Error as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
comm.all_reduce(x)
torch.cuda.synchronize()
comm.check()
say(rank=comm.rank)
""")  # fmt: skip
