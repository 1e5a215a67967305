"""Asynchronous collectives on the host under load: busy threads, many calls, late ranks."""

import threading
from datetime import timedelta
from functools import partial

import pytest
from torch_ranks import starter

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long

BUSY = """
import random, threading

def burn():
    # It takes the interpreter's lock and a core from the threads that make calls, half of the time.
    while True:
        sum(range(30_000))
        time.sleep(0.0005)

threading.Thread(target=burn, daemon=True).start()
start()
dist.barrier()
"""


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


@pytest.mark.takes(20)
def test_many_calls_in_flight(ranks):
    """Calls keep their order and their errors; a wait() for one ends those before it, too."""
    facts = ranks(2, BUSY + """
choice, called, works = random.Random(3), [], []
for turn in range(300):
    x = torch.full((choice.choice((1, 300)),), float(rank + turn))
    if turn % 100 == 50:
        # All ranks refuse it, each by itself.
        x = x.to(torch.float8_e5m2fnuz)
    work = dist.all_reduce(x, async_op=True)
    future = None
    if turn % 3 == 0:
        future = work.get_future().then(lambda _, turn=turn: called.append(turn))
    works.append((work, future, x, 2 * turn + 1))
    if choice.random() < 0.02:
        late, _, x, want = works[random.randrange(len(works))]
        if late.exception() is None and x.dtype == torch.float32:
            assert late.wait() and (x == want).all()

works[-1][0].wait()
assert all(work.is_completed() for work, *_ in works)
for turn, (work, future, x, want) in enumerate(works):
    if turn % 100 == 50:
        assert not work.is_success()
        assert error_of(work.wait)[0] == "InvalidArgument"
        assert "float8" in error_of(work.get_future().wait)[1]
    else:
        assert work.wait() and (x == want).all(), turn
    if future is not None:
        # then() calls back for errors, too.
        future.wait()
assert sorted(called) == [turn for turn in range(0, 300, 3)]

def broken(_):
    raise ZeroDivisionError("in a callback")

x, y = filled(2), filled(2)
failed = dist.all_reduce(x, async_op=True).get_future().then(broken)
after = dist.all_reduce(y, async_op=True)
assert after.wait() and (y == total).all()
say(rank=rank, failed=error_of(failed.wait)[1])
""")  # fmt: skip
    for fact in facts.values():
        assert "in a callback" in fact["failed"]


@pytest.mark.takes(20)
def test_limits_and_shutdown_while_calls_are_queued(ranks):
    """Rank 1 comes late. A wait() with a limit ends in time and may be repeated; at the end, what
    nobody has waited for is made. Rank 1 then leaves without its calls: those of rank 0 fail.
    """
    facts = ranks(2, BUSY + """
if rank == 1:
    time.sleep(1.5)
xs = [filled(50) for _ in range(200)]
works = [dist.all_reduce(x, async_op=True) for x in xs]
late = None
if rank == 0:
    began = time.monotonic()
    late = error_of(lambda: works[-1].wait(timedelta(seconds=0.3)))
    assert time.monotonic() - began < 1.2 and not works[-1].is_completed()
assert works[100].wait(timedelta(seconds=15)) and (xs[100] == total).all()
part = dist.new_group([0, 1])
ys = [filled(50) for _ in range(100)]
if rank == 1:
    time.sleep(0.5)
queued = [dist.all_reduce(y, group=part, async_op=True) for y in ys]
part.shutdown()
assert all((y == total).all() for y in ys)
assert all(work.is_success() for work in queued)

errors = []
if rank == 1:
    works[-1].wait()
    dist.destroy_process_group()
else:
    left = [dist.all_reduce(filled(4), async_op=True) for _ in range(20)]
    futures = [work.get_future() for work in left]
    dist.destroy_process_group()
    assert all(work.is_completed() and not work.is_success() for work in left)
    errors = [error_of(work.wait)[0] for work in left]
    assert all(error_of(future.wait) for future in futures)
assert all((x == total).all() for x in xs)
say(rank=rank, late=late, errors=errors)
""")  # fmt: skip
    kind, text = facts[0]["late"]
    assert kind == "Timeout" and "wait() was given 0.3 s" in text
    assert facts[0]["errors"] == ["PeerLost"] * 20, facts


class Thread:
    """A thread that is alive and makes no calls."""

    def is_alive(self):
        return True


def idle_queue():
    from kccl.interop.torch_queue import Queue

    queue = Queue()
    queue._thread = Thread()
    return queue


def test_a_call_that_is_added_while_the_queue_is_closed_is_made():
    queue, made = idle_queue(), []

    class Lock:
        """In close() another thread adds a call, once the queue is empty."""

        def __enter__(self):
            if not made and not queue._calls:
                works.append(queue.add(lambda: made.append("late"), [], 1))

        def __exit__(self, *_):
            pass

    works = []
    queue._making = Lock()
    queue.close()
    assert made == ["late"] and works[0].is_completed()
    assert queue.add(lambda: made.append("after"), [], 2).is_completed() and made[1:] == ["after"]


def test_a_wait_with_a_limit_leaves_the_call_to_the_thread():
    queue, made = idle_queue(), []
    first, second = (queue.add(lambda n=n: made.append(n), [], n) for n in range(2))
    with pytest.raises(kccl.Timeout, match="the call is not made yet"):
        second.wait(timedelta(seconds=0.01))
    assert made == [] and queue._is_urgent.is_set()
    # Without a limit it makes the call itself, and those before it.
    assert second.wait() and made == [0, 1] and first.is_completed()


def test_an_interrupt_within_a_call_is_raised_and_kept():
    queue = idle_queue()

    def interrupted():
        raise KeyboardInterrupt

    work = queue.add(interrupted, [], 1)
    after = queue.add(lambda: None, [], 2)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert after.wait() and not queue._making.locked()


def test_calls_of_several_threads_are_made_one_at_a_time():
    from kccl.interop.torch_queue import Queue

    queue, made, inside = Queue(), [], []

    def call(name):
        inside.append(name)
        assert len(inside) == 1
        made.append(name)
        inside.remove(name)

    def program(thread):
        for turn in range(50):
            if turn % 3:
                work = queue.add(partial(call, (thread, turn)), [], turn)
                if turn % 5 == 0:
                    work.wait()
            else:
                queue.make(partial(call, (thread, turn)))

    threads = [threading.Thread(target=program, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    assert len(made) == 200
    for each in range(4):
        turns = [turn for thread, turn in made if thread == each]
        assert turns == sorted(turns)
