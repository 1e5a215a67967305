"""Time in which a job was stopped, as by Ctrl-Z, ends no wait."""

import pytest
from ranks import run

from kccl.base import clock

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
