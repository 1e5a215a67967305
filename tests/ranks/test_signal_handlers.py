"""Collectives within Python's signal handlers."""

import os
import signal
import time

import pytest
from ranks import Job

# Both ranks wait for a signal that nobody sends, and the timer's handler makes a call meanwhile.
PROGRAM = """
comm = kccl.init()
other = comm.split(COLOR)
x = np.ones(4, np.float32)
LEARN
def on_alarm(*_):
    other.all_reduce(x)
    say(rank=comm.rank, sum=float(x[0]))
signal.signal(signal.SIGALRM, on_alarm)
comm.barrier()
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    comm.wait(7)
except KeyboardInterrupt:
    say(rank=comm.rank, interrupted=True)
    time.sleep(0.5)
"""


@pytest.mark.parametrize("color", ["0", "comm.rank"])
@pytest.mark.parametrize("learn", ["", "other.all_reduce(np.zeros(4, np.float32))"])
def test_a_call_in_a_handler_leaves_the_call_around_it_open_to_interrupts(color, learn):
    program = PROGRAM.replace("COLOR", color).replace("LEARN", learn)
    with Job(2, program) as job:
        sums = {fact["rank"]: fact["sum"] for fact in job.wait_for(2)}
        expected = 2 if color == "0" else 1
        assert sums == {0: expected, 1: expected}
        time.sleep(0.2)
        started = time.monotonic()
        os.killpg(job.process.pid, signal.SIGINT)
        code, said, err = job.end()
        assert time.monotonic() - started < 5
    assert (code, err) == (0, "")
    assert all(said[rank]["interrupted"] for rank in range(2))
