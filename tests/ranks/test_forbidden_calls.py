"""Where a container forbids pidfd_open and sched_setaffinity: `kccl run` and communicators work."""

import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forbidden import forbid
from long import long_after
from ranks import LAUNCHER, environment, eventually, facts, whole

import kccl
from kccl.backends.watch import Watcher
from kccl.base import syscalls
from kccl.ranks import bootstrap, job, losses, processes, siblings
from kccl.ranks.mesh import Mesh
from kccl.tools import doctor
from kccl.tools.checks.host import process_ends, shared_memory

FORBIDDEN = Path(__file__).parents[1] / "support" / "forbidden.py"


def run(error, names, world_size, program, *options):
    """Exit code, what ranks said by rank, and stderr."""
    command = [sys.executable, FORBIDDEN, error, names, "--", *LAUNCHER, "-n", str(world_size)]
    command += [*options, "--", sys.executable, "-c", whole(program)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    return done.returncode, {fact["rank"]: fact for fact in facts(done.stdout)}, done.stderr


LOST = """
comm = kccl.init()
x = np.ones(4, np.float32)
comm.all_reduce(x)
if comm.rank == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.all_reduce(x)
except kccl.PeerLost as error:
    said = str(error)
smaller = comm.shrink()
y = smaller.all_reduce(np.full(3, 1 << comm.rank, np.int64))
say(rank=comm.rank, said=said, sum=y.tolist())
"""


@pytest.mark.parametrize("error", long_after(1, ["EPERM", "ENOSYS"]))
def test_a_lost_peer_is_seen_and_the_survivors_go_on(error):
    code, said, err = run(error, "pidfd_open,sched_setaffinity", 3, LOST)
    assert code == 128 + signal.SIGKILL, err
    assert err == "kccl: rank 1 was ended by SIGKILL\n"
    for rank in (0, 2):
        assert "the process of peer 1 has ended" in said[rank]["said"]
        assert said[rank]["sum"] == [5, 5, 5]


@pytest.mark.parametrize("error", long_after(1, ["EPERM", "EACCES", "ENOSYS"]))
def test_ranks_run_without_pins_and_it_is_said_once(error):
    program = "say(rank=int(os.environ['KCCL_RANK']), cores=len(os.sched_getaffinity(0)))"
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core cannot have two pinned ranks")
    code, said, err = run(error, "sched_setaffinity", 2, program, "--pin")
    assert code == 0, err
    assert {fact["cores"] for fact in said.values()} == {cores}
    why = os.strerror(getattr(errno, error))
    assert err == f"kccl: the ranks are not pinned: sched_setaffinity is forbidden ({why})\n"


def test_a_rank_that_ends_before_init_is_named():
    program = """
rank = int(os.environ["KCCL_RANK"])
if rank == 1:
    sys.exit(0)
try:
    kccl.init()
except kccl.PeerLost as error:
    say(rank=rank, said=str(error))
"""
    code, said, err = run("EPERM", "pidfd_open", 3, program)
    assert code == 0, err
    for rank in (0, 2):
        assert f"rank {rank} lost rank 1 at start-up" in said[rank]["said"]


CANNOT_START = """
try:
    kccl.init()
except kccl.BackendError as error:
    say(rank=int(os.environ["KCCL_RANK"]), said=str(error))
"""


@pytest.mark.parametrize("name", ["memfd_create", "sched_getaffinity", "sendmsg"])
def test_an_error_at_start_up_names_the_call_that_is_refused(name):
    code, said, err = run("EPERM", name, 2, CANNOT_START)
    assert (code, err) == (0, "") and len(said) == 2
    for fact in said.values():
        assert "start-up failed on rank " in fact["said"]
        assert f"the system refuses {name} (Operation not permitted)" in fact["said"]


def test_commands_name_the_call_that_is_refused(capsys, monkeypatch):
    code, _, err = run("EPERM", "socket", 2, "")
    assert code == 2
    assert err.startswith("kccl: the system refuses socket (Operation not permitted)")
    assert len(err.splitlines()) == 1

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = doctor._run(shared_memory)
    assert found.status == "no" and "the system refuses memfd_create" in found.found


def test_without_proc_a_job_says_so_and_one_rank_needs_none(monkeypatch):
    def fails(path, *_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(os, "readlink", fails)
    with pytest.raises(kccl.BackendError, match=r"^/proc/self/ns/net cannot be read .*mount "):
        job.check_namespaces("net pid user")
    job.check_namespaces("")
    monkeypatch.setattr(os, "listdir", fails)
    job.check_descriptors(1, "a test")


def test_kccl_doctor_says_what_is_lost(refused):
    found = process_ends()
    assert found.status == "warn"
    assert "a rank sees a peer's end by their connection" in found.reason


@pytest.fixture
def refused(monkeypatch):
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)


def test_a_process_runs_until_it_is_a_zombie(refused):
    process = subprocess.Popen(["sleep", "60"])
    assert processes.is_running(process.pid)
    process.kill()
    assert eventually(lambda: not processes.is_running(process.pid))
    process.wait()
    assert not processes.is_running(process.pid)


class _Backend:
    def __init__(self, mesh):
        self.lost = []
        self.watcher = Watcher(mesh.pidfds, self.lose, mesh.end_event)

    def lose(self, rank):
        self.lost.append(rank)


def test_a_watcher_hears_of_a_peer_by_its_connection_and_not_of_its_messages(refused):
    """As on GPUs. The peer is a fork, because a thread of this process is not watched."""
    sockets = bootstrap.thread_sockets(2)
    pid = os.fork()
    if pid == 0:
        with forked_ending():
            sockets[0][1].close()
            sockets[1][0].send(b"a message")
            signal.pause()
    sockets[1][0].close()
    connection = sockets[0][1]
    select.select([connection], [], [])
    mesh = Mesh(0, 2, {})
    # What Mesh does for a peer that is another process; SO_PEERCRED of a pair names its maker.
    mesh.pidfds, mesh.end_event = {1: connection.fileno()}, select.POLLRDHUP
    backend = _Backend(mesh)
    assert not backend.lost
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: backend.lost == [1])
    backend.watcher.stop()
    os.waitpid(pid, 0)
    connection.close()


class forked_ending:
    """A context in a fork: ends its process without pytest's own ends."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os._exit(0)


def test_the_filter_forbids():
    pid = os.fork()
    if pid == 0:
        with forked_ending():
            forbid(["pidfd_open"], 1)
            try:
                os.pidfd_open(os.getpid())
            except PermissionError:
                os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_refused_connect_of_the_watch_is_named(monkeypatch):
    def refuse(connection, name):
        with syscalls.allowed("connect"):
            raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(losses, "dial", refuse)
    with pytest.raises(kccl.BackendError, match="the system refuses connect"):
        losses.Watch(0, "a job", lambda: None)


def test_a_refused_bind_at_the_end_of_a_process_is_no_error(monkeypatch):
    tried = []

    def refuse(name):
        tried.append(name)
        with syscalls.allowed("bind"):
            raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(siblings, "bind", refuse)
    monkeypatch.setattr(siblings, "_launcher", lambda variable: 1)
    siblings.say_that_this_rank_ends({"OMPI_COMM_WORLD_RANK": "0"})
    assert tried
