"""Two threads that use one communicator at the same time: the second one gets an error at once.

The ranks are processes, or threads under run_threads(). Rank 1 makes its call only when rank 0's
second thread has tried another, so rank 0 waits in its own call meanwhile.
"""

import threading
import time

import numpy as np
import preloaded
import pytest
from long import long_after

import kccl

REFUSED = "rank 0: a call of this communicator is under way, in another thread"

# What the second thread does, with `op`, a prepared call, and `y`, an array for calls.
SECOND = {
    "a known call": "comm.all_reduce(y)",
    "an unknown call": "comm.all_reduce(np.ones(7))",
    "the prepared call itself": "op()",
    "another prepared call": "other()",
    "a prepared call that is timed": "op.time(3)",
    "a barrier": "comm.barrier()",
    "a signal": "comm.signal(0)",
}

PROGRAM = """
comm = kccl.init()
gate = comm.split(0)
x, y = np.ones(4, np.float32), np.ones(4, np.float32)
op, other = comm.all_reduce.prepare(x), comm.broadcast.prepare(y)
comm.all_reduce(y)
y.fill(1)
comm.barrier()
errors, may_begin = [], threading.Event()

def second():
    may_begin.wait()
    time.sleep(0.5)
    try:
        CALL
    except kccl.Error as error:
        errors.append(str(error))
    gate.signal(1)

if comm.rank == 0:
    thread = threading.Thread(target=second)
    thread.start()
    may_begin.set()
else:
    gate.wait()
FIRST
if comm.rank == 0:
    thread.join()
sums = [float(x[0]), float(y[0])]
comm.all_reduce(np.ones(7))
say(rank=comm.rank, errors=errors, sums=sums, after=comm.all_reduce(np.ones(4)).tolist())
"""


@pytest.mark.parametrize("call", long_after(3, SECOND.values()), ids=SECOND)
def test_the_second_thread_is_refused_and_the_first_goes_on(call):
    program = PROGRAM.replace("CALL", call).replace("FIRST", "op()")
    code, said, err = preloaded.run(2, program)
    assert code == 0, err
    assert [error[: len(REFUSED)] for error in said[0]["errors"]] == [REFUSED]
    for rank in range(2):
        assert said[rank]["sums"] == [2, 1]
        assert said[rank]["after"] == [2] * 4


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_call_that_is_not_prepared_is_protected_too(check):
    program = PROGRAM.replace("CALL", "comm.all_reduce(y)")
    code, said, err = preloaded.run(
        2, program.replace("FIRST", "comm.all_reduce(x)"), KCCL_CHECK=check
    )
    assert code == 0, err
    assert len(said[0]["errors"]) == 1
    assert said[0]["sums"] == said[1]["sums"] == [2, 1]


def test_ranks_that_are_threads():
    may_begin, has_tried = threading.Event(), threading.Event()

    def main(comm):
        x, errors = np.ones(3, np.float32), []
        comm.barrier()

        def second():
            may_begin.wait()
            time.sleep(0.5)
            try:
                comm.all_reduce(np.ones(9, np.float32))
            except kccl.Error as error:
                errors.append(str(error))
            has_tried.set()

        thread = threading.Thread(target=second)
        if comm.rank == 0:
            thread.start()
            may_begin.set()
        else:
            has_tried.wait(20)
        comm.all_reduce(x)
        if comm.rank == 0:
            thread.join()
        comm.barrier()
        return len(errors), x.tolist()

    found = kccl.run_threads(main, 2)
    assert [sums for _, sums in found] == [[2, 2, 2]] * 2
    assert [count for count, _ in found] == [1, 0]


def test_threads_may_take_turns_and_use_a_communicator_each():
    def main(comm):
        parts = [comm.split(0) for _ in range(2)]
        results = [[], []]

        def drive(number):
            for _ in range(200):
                results[number].append(float(parts[number].all_reduce(np.ones(4))[0]))

        threads = [threading.Thread(target=drive, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Behind them, this thread uses what they used.
        return [*results, [float(parts[0].all_reduce(np.ones(4))[0])]]

    assert kccl.run_threads(main, 2) == [[[2.0] * 200] * 2 + [[2.0]]] * 2


# Methods that Python makes, by the ranks' sockets.
OF_PYTHON = {
    "split": lambda comm: comm.split(0),
    "window": lambda comm: comm.window(8),
    "empty": lambda comm: comm.empty(3),
    "device_comm": lambda comm: comm.device_comm(channels=1, max_bytes=64),
    "gather_objects": lambda comm: comm.gather_objects(1),
    "reset": lambda comm: comm.reset(),
    "shrink": lambda comm: comm.shrink(),
}
ALL = {
    **OF_PYTHON,
    "call": lambda comm: comm.all_reduce(np.ones(9)),
    "barrier": lambda c: c.barrier(),
}


@pytest.mark.parametrize("first", ["barrier", "split", "gather_objects"])
def test_methods_that_python_makes(first):
    """Rank 0 waits in one, and its second thread tries all others."""
    has_tried = threading.Event()

    def main(comm):
        errors = []

        def second():
            while comm.context.backend.context.is_used == 0:
                time.sleep(0.001)
            for name, method in ALL.items():
                try:
                    method(comm)
                except kccl.Error as error:
                    assert str(error).startswith(REFUSED)
                    errors.append(name)
            has_tried.set()

        thread = threading.Thread(target=second)
        if comm.rank == 0:
            thread.start()
        else:
            has_tried.wait(20)
        ALL[first](comm)
        if comm.rank == 0:
            thread.join()
        x = comm.all_reduce(np.ones(3))
        assert comm.gather_objects(comm.rank) == [0, 1]
        return errors, x.tolist()

    found = kccl.run_threads(main, 2)
    assert found == [(list(ALL), [2, 2, 2]), ([], [2, 2, 2])]
