"""Functions that threads call ahead of time."""

import threading
from contextlib import closing
from functools import partial

import pytest

from kccl.engine.base.ahead import ahead

# Nothing here takes longer if the code is right.
WAIT_S = 10


def test_results_come_in_order_and_calls_run_at_the_same_time():
    met = threading.Barrier(3)

    def call(number):
        # It ends only when two others run.
        met.wait(WAIT_S)
        return number

    calls = [(partial(call, number), 1) for number in range(6)]
    assert [*ahead(calls, 3, 100)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("threads", "most_bytes", "nbytes", "begun"),
    # Those that run, and one that waits for a thread; or those that the bytes let be.
    [(2, 100, 1, 3), (4, 20, 10, 2), (4, 29, 10, 2), (4, 5, 10, 1)],
)
def test_no_more_is_made_ahead_than_the_threads_and_the_bytes_allow(
    threads, most_bytes, nbytes, begun
):
    asked = []

    def calls():
        for number in range(9):
            asked.append(number)
            yield partial(int, number), nbytes

    with closing(ahead(calls(), threads, most_bytes)) as results:
        for number, result in enumerate(results):
            assert result == number
            # The last one asked for waits until there is room.
            assert len(asked) == min(9, number + begun + 1)


def test_what_a_call_raises_comes_in_its_place_and_ends_the_others():
    def fail():
        raise OSError("gone")

    later = []
    calls = [(partial(int, 7), 1), (fail, 1), *[(partial(later.append, 1), 1)] * 9]
    results = ahead(calls, 1, 100)
    assert next(results) == 7
    with pytest.raises(OSError, match="gone"):
        next(results)
    assert len(later) <= 2 and next(results, None) is None


@pytest.mark.parametrize("ends_in", ["close", "error"])
def test_an_early_end_waits_for_what_runs_and_begins_no_more(ends_in):
    may_end, began, done = threading.Event(), threading.Event(), []

    def slow():
        began.set()
        may_end.wait(WAIT_S)
        done.append("slow")

    def calls():
        if ends_in == "close":
            yield partial(int, 7), 1
        yield slow, 1
        yield partial(done.append, "later"), 1
        assert began.wait(WAIT_S)
        raise ValueError("no more calls")

    results = ahead(calls(), 1, 100)
    if ends_in == "close":
        assert next(results) == 7 and began.wait(WAIT_S)
    threading.Timer(0.05, may_end.set).start()
    if ends_in == "close":
        results.close()
    else:
        with pytest.raises(ValueError, match="no more calls"):
            next(results)
    assert done == ["slow"]
    assert not any(each.name.startswith("kccl ahead") for each in threading.enumerate())
