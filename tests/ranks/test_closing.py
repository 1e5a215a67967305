"""close() that fails or is interrupted, and what a fork and the end of the process close."""

import sys
import weakref
from types import SimpleNamespace

import numpy as np
import preloaded
import pytest

import kccl
from kccl.backends.host import HostBackend
from kccl.base import lifetime


def interrupt(backend):
    raise KeyboardInterrupt


def test_an_interrupted_close_closes(monkeypatch):
    monkeypatch.setattr(HostBackend, "leave", interrupt)
    aborted = []
    monkeypatch.setattr(HostBackend, "abort", lambda backend: aborted.append(backend))

    def main(comm):
        comm.all_reduce(np.ones(2))
        with pytest.raises(KeyboardInterrupt):
            comm.close()
        comm.close()
        for call in (lambda: comm.all_reduce(np.ones(2)), comm.barrier, comm.reset, comm.shrink):
            with pytest.raises(kccl.Error, match="the communicator is closed on rank"):
                call()
        return comm in lifetime._open, [link.is_open for link in comm._mesh._links.values()]

    assert kccl.run_threads(main, 2) == [(False, [False])] * 2
    assert len(aborted) == 2, "the peers must hear of it"


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(lifetime, "_open", weakref.WeakKeyDictionary())


class Fake:
    launcher = "mpi"

    def __init__(self, events, name):
        self.events, self.name = events, name

    def close(self):
        self.events.append(f"close {self.name}")
        if self.name == "first":
            raise ValueError("mishap")


def test_one_close_that_raises_at_exit_keeps_no_other_open(watched, monkeypatch):
    events = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, _: events.append(str(error)))
    comms = [Fake(events, name) for name in ("first", "second")]
    for comm in comms:
        lifetime.add(comm, id, id)
    lifetime._at_exit()
    assert sorted(events) == ["close first", "close second", "mishap"]


class Named(SimpleNamespace):
    __hash__ = object.__hash__


def test_in_a_fork_all_refuse_before_one_is_released(watched):
    events = []
    comms = [Named(name=name) for name in "ab"]
    for comm in comms:
        lifetime.add(
            comm,
            lambda comm: events.append(f"refuse {comm.name}"),
            lambda comm: events.append(f"release {comm.name}"),
        )
    lifetime._at_fork()
    assert events == ["refuse a", "refuse b", "release a", "release b"]


def test_a_fork_does_not_leave_the_part_of_an_unfinished_shrink():
    """Releasing the communicator closes the part, whose peers are the parent's."""
    program = """
from kccl.ranks.mesh import Mesh
comm = kccl.init()
part = comm.split(0)
comm._mesh.unfinished = part  # as while the others have not voted
if comm.rank == 0:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.3)  # so that rank 1 waits
x = part.all_reduce(np.ones(1))
say(rank=comm.rank, sum=x[0])
"""
    code, said, err = preloaded.run(2, program)
    assert code == 0, err
    assert [said[rank]["sum"] for rank in range(2)] == [2, 2]
