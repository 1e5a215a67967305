"""preloaded.py starts the ranks of tests/hardware; here on the host."""

import os
import signal
import time
from importlib.util import find_spec

import preloaded
import pytest
from ranks import eventually

# Tests of GPUs alone start ranks in this way.
pytestmark = pytest.mark.long
ADD = """
comm = kccl.init(backend="host")
x = np.full(5, comm.rank + 1, np.float32)
comm.all_reduce(x)
say(rank=comm.rank, x=x.tolist(), wish=os.environ.get("WISH"))
"""


def test_ranks_meet_and_have_their_own_variables():
    for wish in ("one", "another"):
        code, facts, err = preloaded.run(3, ADD, WISH=wish)
        assert code == 0, err
        assert set(facts) == {0, 1, 2}
        assert all(fact["x"] == [6] * 5 and fact["wish"] == wish for fact in facts.values())


def test_ranks_begin_with_slow_modules_imported():
    known = [name for name in ("numpy", "pytest", "torch") if find_spec(name)]
    assert "pytest" in known
    # The program itself imports numpy.
    _, facts, err = preloaded.run(
        1,
        "say(rank=0, known=[name for name in ('numpy', 'pytest', 'torch') if name in sys.modules])",
    )
    assert facts[0]["known"] == known, err


def test_an_error_of_a_rank_is_reported():
    code, facts, err = preloaded.run(
        2, ADD + "comm.close()\nassert comm.rank == 0, 'no luck'\n", KCCL_TIMEOUT="5"
    )
    assert code == 1 and set(facts) == {0, 1}
    assert "rank 1: exit code 1" in err and "AssertionError: no luck" in err


def test_nothing_but_what_ranks_wrote_is_reported_without_an_error():
    assert preloaded.run(2, "say(rank=0)")[2] == ""
    assert preloaded.run(1, "print('a warning', file=sys.stderr)")[2] == "a warning\n"


def test_exit_handlers_and_threads_of_a_rank_run_to_their_end():
    program = "import atexit\natexit.register(lambda: say(rank=0, last=True))\nsys.exit(3)\n"
    code, facts, _ = preloaded.run(1, program)
    assert code == 3 and facts == {0: {"rank": 0, "last": True}}
    code, _, err = preloaded.run(1, "sys.exit('no more')")
    assert code == 1 and "no more" in err
    late = "threading.Thread(target=lambda: (time.sleep(0.3), say(rank=0))).start()"
    assert preloaded.run(1, late)[1] == {0: {"rank": 0}}


def test_ranks_past_the_limit_or_killed_are_reported_and_gone():
    with preloaded.Job(2, "say(rank=int(os.environ['KCCL_RANK']))\ntime.sleep(60)\n") as job:
        assert eventually(lambda: len(job.facts()) == 2, 20)
        os.kill(job.processes[1].pid, signal.SIGKILL)
        began = time.monotonic()
        code, facts, err = job.end(0.5)
        pids = [process.pid for process in job.processes]
    assert time.monotonic() - began < 10
    assert code == preloaded.TIMED_OUT and len(facts) == 2
    assert "rank 0: exit code None" in err and "rank 1: exit code -9" in err
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_a_rank_that_does_not_end_is_an_error():
    hangs = "time.sleep(60)"
    with pytest.raises(TimeoutError, match=r"(?s)not ended after 1 s.*rank 0: exit code None"):
        preloaded.run(1, hangs, timeout=1)
