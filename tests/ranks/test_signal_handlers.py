"""Collectives within Python's signal handlers."""

import os
import signal
import time

import preloaded
import pytest
from long import long_beyond_each
from ranks import AT_ONCE, Job

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


@pytest.mark.parametrize(
    ("color", "learn"),
    long_beyond_each(["0", "comm.rank"], ["", "other.all_reduce(np.zeros(4, np.float32))"]),
)
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
        assert time.monotonic() - started < AT_ONCE
    assert (code, err) == (0, "")
    assert all(said[rank]["interrupted"] for rank in range(2))


# Rank 0's handler runs while its call waits for rank 1, which begins only when the handler has
# ended.
SAME = """
comm = kccl.init()
gate = comm.split(0)
x, y = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
comm.all_reduce(y)
errors = []
def on_alarm(*_):
    try:
        CALL
    except kccl.Error as error:
        errors.append(str(error))
    gate.signal(1)
signal.signal(signal.SIGALRM, on_alarm)
comm.barrier()
if comm.rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
else:
    gate.wait()
comm.all_reduce(x)
say(rank=comm.rank, errors=errors, sum=x.sum().item(), after=comm.all_reduce(x).sum().item())
"""


@pytest.mark.parametrize(
    ("call", "count"),
    long_beyond_each(["comm.all_reduce(y)", "comm.broadcast(y)", "comm.signal(0)"], [4, 1 << 16]),
)
def test_a_call_of_the_same_communicator_in_a_handler_is_refused(call, count):
    program = SAME.replace("CALL", call).replace("COUNT", str(count))
    code, said, err = preloaded.run(2, program, KCCL_TIMEOUT="5")
    assert (code, err) == (0, "")
    assert [len(said[rank]["errors"]) for rank in range(2)] == [1, 0]
    assert "or around this signal handler; nothing was sent" in said[0]["errors"][0]
    for rank in range(2):
        assert (said[rank]["sum"], said[rank]["after"]) == (2 * count, 4 * count)
