"""Time in which a job was stopped, as by Ctrl-Z, ends no wait."""

import contextlib
import socket
import threading
import time

import pytest
from ranks import AT_ONCE, run

from kccl.base import clock
from kccl.ranks import nodes

# Rank 0 waits in a call and out of band. Then both ranks are stopped, for longer than its limits.
STOPPED = """
comm = kccl.init()
other = comm.split(0)
pids = comm.gather_objects(os.getpid())
comm.timeout = other.timeout = 1.0
x = np.ones(4, np.float32)
if comm.rank == 0:
    waits = threading.Thread(target=other.split, args=(0,))
    waits.start()
    comm.all_reduce(x)
    waits.join()
else:
    one, two = pids
    stops = f"kill -STOP {one} {two}; sleep 1.3; kill -CONT {one} {two}"
    began = time.monotonic()
    os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", stops)
    before = now = began
    while now - before < 1 and now - began < 20:
        before, now = now, time.monotonic()
    # Otherwise rank 0, when it goes on, might find these calls before it looks at the clock.
    time.sleep(0.3)
    comm.all_reduce(x)
    other.split(0)
say(rank=comm.rank, sum=x.tolist())
"""


def test_time_in_which_the_job_was_stopped_does_not_count():
    code, facts, err = run(2, STOPPED)
    assert code == 0, err
    assert facts[0]["sum"] == facts[1]["sum"] == [2] * 4


def test_the_clock_of_waits(monkeypatch):
    times = iter([100.0, 100.2, 5000.2, 5000.3])
    monkeypatch.setattr(clock, "_looks", clock._Looks())
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(times))
    began = clock.now()
    assert [clock.now() - began for _ in range(3)] == pytest.approx([0.2, 0.5, 0.6])


class Over(Exception):
    """The time of a wait is over."""


def far(port):
    """The name of a rank of another node, and a limit of a second by the clock of waits."""
    ends = clock.now() + 1

    def look():
        if clock.now() > ends:
            raise Over

    return f"kccl-1-a@1@{b'token'.hex()}@{port}@127.0.0.1", look


def test_a_far_rank_that_says_nothing_takes_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(nodes, "_TRY_S", 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name, look = far(listener.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(Over):
            nodes.connect(name, look)
        assert time.monotonic() - began < 1 + AT_ONCE


def test_a_far_rank_that_answers_no_connection_does_not_either(monkeypatch):
    monkeypatch.setattr(nodes, "_TRY_S", 20)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as s:
        for _ in range(4):
            # The listener's queue is full then, and what comes is dropped.
            waiting = s.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        name, look = far(listener.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(Over):
            nodes.connect(name, look)
        assert time.monotonic() - began < 1 + AT_ONCE


def test_an_answer_in_two_parts_is_one(monkeypatch):
    monkeypatch.setattr(nodes, "_TRY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name, look = far(listener.getsockname()[1])

        def answer():
            with listener.accept()[0] as connection:
                connection.sendall(b"kc")
                time.sleep(2 * clock.LOOK_S)
                connection.sendall(b"cl")

        answers = threading.Thread(target=answer)
        answers.start()
        with nodes.connect(name, look) as connection:
            assert connection.gettimeout() is None
        answers.join()
