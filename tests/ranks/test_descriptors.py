"""A communicator that is dropped without close() gives its descriptors back."""

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import preloaded
import pytest
from ranks import LAUNCHER, environment, eventually, whole

import kccl
from kccl.backends.host import HostBackend
from kccl.backends.watch import Watcher
from kccl.base import descriptors
from kccl.ranks.link import Link


def open_now():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


COUNT = """
def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
"""

DROPPED = """
import gc
import json
comm = kccl.init()
comm.barrier()
before = count()
for number in range(100):
    part = comm.split(0)
    x = part.all_reduce(np.ones(4, np.float32))
    assert x[0] == comm.world_size
    if number % 2 == 0:
        part.all_reduce.prepare(x)()
del part
comm.barrier()
after = count()
say(rank=comm.rank, before=before, after=after)
comm.barrier()
"""


@pytest.mark.long
def test_dropped_parts_of_processes():
    code, said, err = preloaded.run(3, COUNT + DROPPED)
    assert code == 0, err
    assert sorted(said) == [0, 1, 2]
    for fact in said.values():
        assert fact["after"] == fact["before"]


HAS = """
import gc, resource
gc.disable()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def has():
    mapped = sum("kccl" in line for line in open("/proc/self/maps"))
    return len(os.listdir("/proc/self/fd")), mapped
"""
KEPT = """
comm = kccl.init()
comm.barrier()
kept = []
before = has()
for number in range(100):
    part = comm.split(0)
    x = np.ones(4, np.float32)
    op, both = part.all_reduce.prepare(x), part.all_gather(x)
    op(), part.broadcast(x), part.barrier(), part.signal(part.rank), part.wait()
    part.close()
    kept += [part, op]
say(rank=comm.rank, before=before, after=has())
comm.barrier()
"""
MADE_AGAIN = """
before = None
for number in range(40):
    comm = kccl.init()
    window, own = comm.window(100_000), comm.device_comm(channels=1, max_bytes=64)
    smaller = comm.shrink()
    array = smaller.empty(9)
    array += smaller.rank
    smaller.close()
    if number == 1:
        before = has()
assert array.sum() == 9 * smaller.rank and bytes(window.local) == bytes(window.nbytes)
say(rank=comm.rank, before=before, after=has())
"""


@pytest.mark.parametrize("program", [KEPT, MADE_AGAIN], ids=["kept", "made again"])
def test_close_frees_at_once(program):
    """Without the cyclic collector, and while the program keeps what is closed."""
    code, said, err = preloaded.run(2, HAS + program)
    assert code == 0, err
    for fact in said.values():
        assert fact["after"] == fact["before"]


def test_nothing_waits_for_the_cyclic_collector():
    def main(comm):
        part = comm.split(0)
        x = np.ones(4, np.float32)
        part.all_reduce.prepare(x)()
        part.reduce_scatter(np.ones(2)), part.all_reduce(x), part.barrier()
        part.put(x, 0, part.window(64))
        part.device_comm(channels=1, max_bytes=64), part.gather_objects(part.plan("barrier").name)
        return weakref.ref(part.context), weakref.ref(part), part.close()

    gc.collect()
    gc.disable()
    try:
        for context, part, _ in kccl.run_threads(main, 2):
            assert (context(), part()) == (None, None)
    finally:
        gc.enable()


def test_dropped_communicators_of_threads():
    def main(comm):
        for _ in range(20):
            comm.split(0).barrier()

    kccl.run_threads(main, 2)
    before = open_now()
    kccl.run_threads(main, 3)
    assert open_now() == before


def test_a_prepared_call_keeps_what_it_uses():
    """It works, and hears of the end of a peer, when the communicator itself is dropped."""
    program = """
import gc
import json
comm = kccl.init()
x = np.ones(4, np.float32)
call = comm.split(0).all_reduce.prepare(x)
gc.collect()
call()
comm.barrier()
if comm.rank == 0:
    os._exit(3)
try:
    call()
except kccl.PeerLost as error:
    say(rank=comm.rank, peer=error.peer, sum=float(x[0]))
"""
    code, said, err = preloaded.run(2, program)
    assert code == 3, err
    assert said == {1: {"rank": 1, "peer": 0, "sum": 2.0}}


class WatchesItsPeers:
    """A backend, as far as its watcher goes: they refer to each other."""

    def __init__(self, pidfds):
        self.lost = []
        self.watcher = Watcher(pidfds, self.lose)

    def lose(self, rank):
        self.lost.append(rank)


@pytest.fixture
def peer():
    with subprocess.Popen(["sleep", "60"]) as process:
        pidfd = os.pidfd_open(process.pid)
        yield process, pidfd
        os.close(pidfd)
        process.kill()


def test_a_dropped_backend_ends_its_watcher(peer):
    _, pidfd = peer
    before, threads = open_now(), threading.active_count()
    backend = WatchesItsPeers({0: -1, 2: pidfd})
    assert (open_now() - before, threading.active_count() - threads) == (3, 1)
    backend.itself = backend
    del backend
    assert eventually(lambda: (open_now(), threading.active_count()) == (before, threads))


def test_a_watcher_hears_that_a_process_ends(peer):
    process, pidfd = peer
    before = open_now()
    backend = WatchesItsPeers({0: -1, 2: pidfd})
    process.kill()
    assert eventually(lambda: backend.lost == [2])
    backend.watcher.stop()
    backend.watcher.stop()
    assert open_now() == before


def test_ranks_that_are_threads_are_not_watched():
    before = open_now()
    backend = WatchesItsPeers({0: -1, 1: -1})
    assert open_now() == before
    backend.watcher.stop()


def test_a_fork_does_not_end_its_parents_watcher(peer):
    """Nor does it keep the parent from ending it."""
    process, pidfd = peer
    before = open_now()
    backend = WatchesItsPeers({2: pidfd})
    gate, opened = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            backend.watcher._end()
            os.close(opened)
            os.read(gate, 1)
        finally:
            os._exit(0)
    time.sleep(0.1)
    assert backend.watcher._thread.is_alive()
    process.kill()
    assert eventually(lambda: backend.lost == [2])
    backend.watcher.stop()
    os.close(opened)
    os.waitpid(pid, 0)
    os.close(gate)
    assert open_now() == before


def test_a_communicator_that_is_not_made_leaves(monkeypatch):
    left = []
    monkeypatch.setattr(HostBackend, "leave", lambda backend: left.append(backend))
    monkeypatch.setattr(kccl.Communicator, "_meet_at_start", lambda comm, timeout: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kccl.run_threads(lambda comm: None, 1)
    assert len(left) == 1


# What a rank's standard streams are, when they were closed at its start and again later.
CLOSED = """
def standard():
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
def close():
    for fd in range(3):
        os.close(fd)
    print("to nobody")
found = []
comm = kccl.init()
found.append(standard())
close()
window = comm.window(64)
found.append(standard())
close()
part = comm.split(0)
found.append(standard())
close()
comm.shrink()
found.append(standard())
os.write(1, b"to nobody")
part.barrier()
with open(f"found {comm.rank}", "w") as file:
    json.dump(found, file)
"""


def test_no_socket_becomes_a_standard_stream(tmp_path, monkeypatch):
    """Python opens files of its own for a moment only, so a program may start without streams."""
    monkeypatch.chdir(tmp_path)
    rank = [sys.executable, "-c", whole(CLOSED)]
    closes = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    command = [*closes, *LAUNCHER, "-n", "2", "--", *closes, *rank]
    assert subprocess.run(command, env=environment(), timeout=60).returncode == 0
    for number in range(2):
        found = json.loads((tmp_path / f"found {number}").read_text())
        assert found == [["/dev/null"] * 3] * 4


def test_a_program_that_closes_nothing_has_no_warning_of_resources(tmp_path):
    """As README's first program. `kccl run` too works under `python -X dev`."""
    program = tmp_path / "program.py"
    program.write_text("""
import kccl, numpy as np
comm = kccl.init()
x = np.full(4, comm.rank + 1, np.float32)
comm.all_reduce.prepare(x)()
part, window = comm.split(0), comm.window(64)
""")
    python = [sys.executable, "-X", "dev"]
    command = [*python, *LAUNCHER[1:], "-n", "2", "--", *python, str(program)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_link_does_not_wait_where_a_program_has_a_default_time_out():
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    try:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.closing(Link(ours)) as link:
            assert link.socket.gettimeout() == 0
    finally:
        socket.setdefaulttimeout(before)


def test_a_standard_number_that_another_thread_takes_costs_no_descriptor(monkeypatch):
    monkeypatch.setattr(descriptors, "is_open", lambda fd: False)
    before = open_now()
    assert descriptors.keep_standard() == [0, 1, 2]
    assert open_now() == before


def test_closed_streams_without_a_null_device_are_a_sentence(monkeypatch):
    monkeypatch.setattr(descriptors, "is_open", lambda fd: fd != 2)
    monkeypatch.setattr(os, "devnull", "/dev/none-of-this-name")
    with pytest.raises(kccl.BackendError, match=r"stream 2 is closed, and /dev/none.*No such file"):
        descriptors.keep_standard()
