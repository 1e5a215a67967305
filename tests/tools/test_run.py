"""`kccl run`, start-up, and ranks that end before their time."""

import os
import random
import selectors
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from long import long_after
from ranks import AT_ONCE, LAUNCHER, Job, environment, eventually, run, traces

from kccl.tools.run import _Labelled

SUM = """
comm = kccl.init()
x = np.full(5, comm.rank + 1, np.float64)
comm.all_reduce(x)
say(rank=comm.rank, world_size=comm.world_size, launcher=comm.launcher, sum=x.tolist())
"""

# Ranks exchange until one is lost; then the others go on.
LOST = """
victims = VICTIMS
comm = kccl.init()
x = np.empty(64, np.float32)
comm.barrier()
if comm.rank in victims:
    def end():
        time.sleep(0.3)
        say(rank=comm.rank, killed_at=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=end).start()
error = None
while error is None:
    x.fill(1)
    try:
        comm.all_reduce(x)
        assert (x == comm.world_size).all()
    except kccl.PeerLost as caught:
        error, lost_at = caught, time.monotonic()
if comm.rank in victims:
    time.sleep(20)  # It heard of the other victim first. No survivor may count it.
smaller = comm.shrink()
y = np.full(64, smaller.rank + 1, np.float32)
for _ in range(100):
    z = smaller.all_reduce(y.copy())
smaller.barrier()
say(rank=comm.rank, lost_at=lost_at, message=str(error), peer=error.peer,
    collective=error.collective, epoch=error.epoch_wanted, new_rank=smaller.rank,
    new_size=smaller.world_size, sum=float(z[0]))
"""


# What follows runs on a rank when the launcher has heard of the end of the rank before.
AFTER_EACH_OTHER = """
rank = int(os.environ["KCCL_RANK"])
with open(f"{rank}~", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{rank}~", str(rank))
while rank > 0 and not os.path.exists(str(rank - 1)):
    time.sleep(0.01)
while rank > 0 and os.path.exists("/proc/" + open(str(rank - 1)).read()):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("world_size", long_after(2, [1, 3, 2, 4]))
def test_ranks_find_each_other(world_size):
    code, facts, err = run(world_size, SUM)
    assert (code, err) == (0, "")
    assert sorted(facts) == list(range(world_size))
    for fact in facts.values():
        assert fact["world_size"] == world_size
        assert fact["launcher"] == "kccl run"
        assert fact["sum"] == [world_size * (world_size + 1) / 2] * 5


def test_ranks_have_the_variables_of_torchrun():
    """So torch.distributed's init_process_group() needs no arguments but the backend's name."""
    code, facts, err = run(3, """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
comm = kccl.init()
everyone = comm.gather_objects([os.environ[name] for name in names])
assert comm.launcher == "kccl run"
say(rank=comm.rank, everyone=everyone)
""")  # fmt: skip
    assert code == 0, err
    everyone = facts[0]["everyone"]
    port = everyone[0][-1]
    assert everyone == [[str(r), str(r), "3", "3", "127.0.0.1", port] for r in range(3)]
    assert 1024 <= int(port) < 65536


def test_exit_code_is_the_first_that_is_not_zero():
    code, _, err = run(3, AFTER_EACH_OTHER + "sys.exit(3 * rank)\n")
    assert code == 3
    assert err.splitlines() == [
        "kccl: rank 1 ended with exit code 3",
        "kccl: rank 2 ended with exit code 6",
    ]


def test_a_signal_is_named():
    code, _, err = run(1, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert code == 128 + signal.SIGSEGV
    assert err == "kccl: rank 0 was ended by SIGSEGV\n"


@pytest.mark.parametrize(
    ("world_size", "victims"),
    long_after(1, [(2, [0]), (2, [1]), (3, [1]), (4, [0]), (4, [1, 2]), (4, [0, 3])]),
)
def test_survivors_go_on(world_size, victims):
    code, facts, err = run(world_size, LOST.replace("VICTIMS", str(victims)))
    assert code == 128 + signal.SIGKILL, err
    assert all(f"kccl: rank {victim} was ended by SIGKILL" in err for victim in victims)
    survivors = [rank for rank in range(world_size) if rank not in victims]
    killed_at = max(facts[victim]["killed_at"] for victim in victims)
    for new_rank, rank in enumerate(survivors):
        fact = facts[rank]
        assert fact["lost_at"] - killed_at < AT_ONCE
        assert fact["peer"] in victims
        assert fact["collective"].startswith("all_reduce")
        assert fact["epoch"] > 0
        assert f"peer {fact['peer']}" in fact["message"]
        assert (fact["new_rank"], fact["new_size"]) == (new_rank, len(survivors))
        assert fact["sum"] == len(survivors) * (len(survivors) + 1) / 2


BUSY = """
comm = kccl.init()
say(rank=comm.rank)
while True:
    window = comm.window(1 << 16)
    half = comm.split(comm.rank % 2)
    half.all_reduce(np.ones(100000, np.float32))
    half.close()
    comm.all_reduce(np.ones(10, np.float32))
"""


@pytest.mark.parametrize("seed", long_after(1, [1, 0, 2, 3, 4]))
def test_kill_leaves_nothing_behind(seed):
    with Job(3, BUSY) as job:
        moment = random.Random(seed)
        if seed:
            job.wait_for(3)
            time.sleep(moment.uniform(0, 0.2))
        else:
            assert eventually(lambda: len(job.rank_pids()) == 3)
            time.sleep(moment.uniform(0, 0.2))
        pids = job.pids()
        assert not seed or traces(pids)
        for pid in job.rank_pids().values():
            os.kill(pid, signal.SIGKILL)
        code, _, err = job.end()
        assert code == 128 + signal.SIGKILL
        assert err.count("was ended by SIGKILL") == 3
        assert job.pids() == []
    assert eventually(lambda: not traces(pids))


@pytest.mark.parametrize("seed", long_after(1, [1, 0, 2, 3]))
def test_ranks_end_with_their_launcher(seed):
    with Job(3, BUSY) as job:
        if seed:
            job.wait_for(3)
        time.sleep(random.Random(seed).uniform(0, 0.3))
        pids = job.pids()
        job.process.kill()
        assert eventually(lambda: job.pids() == [])
    assert eventually(lambda: not traces(pids))


def test_helpers_and_ranks_behind_a_shell_end_with_the_launcher():
    program = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "sleep 1000; true"])
say(rank=0)
time.sleep(1000)
"""
    with Job(1, program) as job:
        job.wait_for(1)
        # Launcher, guard, rank, shell and its sleep.
        assert eventually(lambda: len(job.pids()) == 5)
        job.process.kill()
        assert eventually(lambda: job.pids() == [])


def test_interrupt_reaches_waiting_ranks_once():
    program = """
comm = kccl.init()
comm.barrier()
try:
    say(rank=comm.rank)
    comm.wait(7) if comm.rank == 0 else comm.barrier()
except KeyboardInterrupt:
    comm.close()
    time.sleep(0.1)
    say(rank=comm.rank, interrupted=True)
"""
    with Job(3, program) as job:
        job.wait_for(3)
        time.sleep(0.3)
        start = time.monotonic()
        os.killpg(job.process.pid, signal.SIGINT)
        code, facts, err = job.end()
        assert time.monotonic() - start < AT_ONCE
    assert (code, err) == (0, "")
    assert all(facts[rank]["interrupted"] for rank in range(3))


def test_second_signal_kills():
    program = """
signal.signal(signal.SIGTERM, lambda *_: say(rank=int(os.environ["KCCL_RANK"])))
say(rank=-1)
while True:
    time.sleep(1)
"""
    with Job(2, program) as job:
        job.wait_for(2)
        job.process.terminate()
        job.wait_for(2)
        job.process.terminate()
        code, _, err = job.end()
    assert code == 128 + signal.SIGKILL
    assert err.count("was ended by SIGKILL") == 2


def test_timeout_option():
    code, _, err = run(2, "time.sleep(100)", "--timeout", "0.5")
    assert code == 124
    assert "0.5 s have passed: ending rank(s) 0, 1" in err


# Rank 1 fails when the others are ready. Rank 0 goes on when it is told to end, and rank 2 ends
# with a code of its own.
FAILS = """
rank = int(os.environ["KCCL_RANK"])
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 2:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
if rank != 1:
    open(f"ready {rank}", "w").close()
    time.sleep(LASTS)
    sys.exit(0)
while not (os.path.exists("ready 0") and os.path.exists("ready 2")):
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_failed_rank_ends_the_others_if_asked():
    start = time.monotonic()
    code, _, err = run(3, FAILS.replace("LASTS", "100"), "--kill-on-error")
    assert code == 3
    assert time.monotonic() - start < 10
    assert err.splitlines() == [
        "kccl: rank 1 ended with exit code 3",
        "kccl: rank 1 failed: ending rank(s) 0, 2",
        "kccl: rank 2 ended with exit code 7",
        "kccl: rank 0 was ended by SIGKILL",
    ]


def test_a_failed_rank_leaves_the_others_alone_else():
    code, _, err = run(3, FAILS.replace("LASTS", "1.2"))
    assert (code, err) == (3, "kccl: rank 1 ended with exit code 3\n")


def test_ranks_end_in_their_own_time_after_a_signal():
    """--kill-on-error does not shorten their clean-up."""
    ends = textwrap.indent(AFTER_EACH_OTHER, "    ")
    program = f"""
rank = int(os.environ["KCCL_RANK"])
try:
    say(rank=rank)
    time.sleep(100)
except KeyboardInterrupt:
{ends}
    time.sleep(0.5 * rank)
    say(rank=rank)
    sys.exit(5 + rank)
"""
    with Job(2, program, "--kill-on-error") as job:
        job.wait_for(2)
        os.killpg(job.process.pid, signal.SIGINT)
        code, facts, err = job.end()
    assert (code, sorted(facts)) == (5, [0, 1])
    assert "ending rank(s)" not in err


def test_labels():
    program = "print('one\\ntwo', end=''); sys.stderr.write('three\\n')"
    with Job(2, program, "--label") as job:
        out, err = job.process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    assert sorted(err.splitlines()) == ["[0] three", "[1] three"]


def test_a_stream_that_is_closed_may_have_been_ready_at_the_same_time(capfdbinary):
    """A rank ends, and its child has printed something, before the launcher looks at either."""
    source, sink = os.pipe()
    with (
        selectors.DefaultSelector() as selector,
        open(source, "rb") as said,
        open(sink, "wb", buffering=0) as helper,
    ):
        stream = _Labelled(0, said, sys.stdout.buffer, selector)
        helper.write(b"said by a helper\n")
        ((key, _),) = selector.select()
        stream.close()
        assert key.data() is False
    assert capfdbinary.readouterr().out == b"[0] said by a helper\n"


def test_pins():
    cores = sorted(os.sched_getaffinity(0))
    program = "say(rank=int(os.environ['KCCL_RANK']), cores=sorted(os.sched_getaffinity(0)))"
    code, facts, _ = run(len(cores), program, "--pin")
    assert code == 0
    assert sorted(fact["cores"] for fact in facts.values()) == [[core] for core in cores]
    code, _, err = run(len(cores) + 1, program, "--pin")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be pinned" in err


def test_standard_input_is_rank_0s():
    program = "import os, sys; os.write(1, (os.environ['KCCL_RANK'] + sys.stdin.read()).encode())"
    done = subprocess.run(
        [*LAUNCHER, "-n", "2", "--", sys.executable, "-c", program],
        **{"env": environment(), "input": "x", "capture_output": True, "text": True, "timeout": 60},
    )
    assert sorted(done.stdout) == ["0", "1", "x"]


def test_command_that_does_not_exist():
    done = subprocess.run(
        [*LAUNCHER, "-n", "2", "--", "/nonexistent/program"],
        **{"env": environment(), "capture_output": True, "text": True, "timeout": 60},
    )
    assert done.returncode == 2
    assert done.stderr == "kccl: cannot start '/nonexistent/program': No such file or directory\n"


def test_two_communicators_at_once():
    program = """
first, second = kccl.init(), kccl.init()
for i in range(200):
    x, y = np.full(3, i, np.int64), np.full(70000, 1, np.float32)
    first.all_reduce(x)
    second.all_reduce(y)
    second.barrier()
    first.broadcast(x, root=1)
    assert (x == 3 * i).all() and (y == 3).all()
first.close()
second.all_reduce(y)
say(rank=second.rank, y=float(y[0]))
"""
    code, facts, err = run(3, program)
    assert (code, err) == (0, "")
    assert [facts[rank]["y"] for rank in range(3)] == [9, 9, 9]


def test_a_fork_may_not_use_the_communicator():
    program = """
comm = kccl.init()
x = np.ones(4, np.float32)
op = comm.all_reduce.prepare(x)
comm.all_reduce(x)
pid = os.fork()
if pid == 0:
    calls = (lambda: comm.all_reduce(x), op, comm.barrier, lambda: comm.broadcast(x),
             lambda: comm.window(64), lambda: comm.split(0), lambda: comm.gather_objects(1),
             lambda: comm.signal(0), comm.shrink, comm.reset)
    for call in calls:
        try:
            call()
        except kccl.Error as error:
            assert "fork of rank" in str(error), error
        else:
            os._exit(1)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
comm.barrier()
x.fill(1)
comm.all_reduce(x)
say(rank=comm.rank, child=code, x=float(x[0]), gathered=comm.gather_objects(comm.rank))
"""
    code, facts, err = run(2, program)
    assert (code, err) == (0, "")
    for rank in range(2):
        assert facts[rank] == {"rank": rank, "child": 0, "x": 2.0, "gathered": [0, 1]}
