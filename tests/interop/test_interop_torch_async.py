"""Asynchronous collectives on the host: they run beside the program, in the order of the calls."""

import pytest
from torch_ranks import starter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


def test_a_call_runs_while_the_program_goes_on(ranks):
    """Rank 1 comes late. Meanwhile rank 0 computes, sends messages, and makes more calls."""
    ranks(2, """
start()
dist.barrier()
x, y, z = filled(1000), filled(3), filled(2)
if rank == 1:
    # Rank 0 sends this behind its first collective, before rank 1 has made that.
    dist.recv(z, 0)
    assert (z == 1).all()
    time.sleep(0.5)
began = time.monotonic()
first = dist.all_reduce(x, async_op=True)
second = dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True)
if rank == 0:
    assert not first.is_completed() and not second.is_completed()
    dist.send(z, 1)
    assert time.monotonic() - began < 0.4
    # Nobody waits, and the calls are made.
    while not second.is_completed():
        assert time.monotonic() - began < 10
        time.sleep(0.01)
    assert first.is_completed() and first.is_success() and first.exception() is None
assert second.wait() and first.wait()
assert (x == total).all() and (y == world_size).all()
assert first.result()[0] is x
assert first._get_sequence_number() + 1 == second._get_sequence_number()
dist.destroy_process_group()
say(rank=rank)
""")  # fmt: skip


def test_calls_that_wait_come_behind_those_that_do_not(ranks):
    """Whatever the mixture, all ranks' calls have one order."""
    ranks(3, """
import random
start()
choice = random.Random(7)
works = []
for turn in range(300):
    x = torch.full((choice.choice((1, 50, 5000)),), float(rank + turn))
    kind = choice.randrange(3)
    waits = choice.random() < 0.3
    if kind == 0:
        work = dist.all_reduce(x, async_op=not waits)
        want = world_size * turn + 3
    elif kind == 1:
        work = dist.broadcast(x, turn % 3, async_op=not waits)
        want = turn % 3 + turn
    else:
        out = torch.zeros(3 * x.numel())
        work = dist.all_gather_into_tensor(out, x, async_op=not waits)
        x, want = out, torch.cat([torch.full_like(x, float(each + turn)) for each in range(3)])
    if waits:
        assert (x == want).all()
    else:
        works.append((work, x, want))
    if choice.random() < 0.1:
        # Each rank waits for other ones than its peers.
        work, x, want = works.pop(random.randrange(len(works)))
        assert work.wait() and (x == want).all()
    if choice.random() < 0.05:
        dist.barrier()
for work, x, want in works:
    assert work.wait() and (x == want).all()
say(rank=rank)
""")  # fmt: skip


def test_futures_and_their_callbacks(ranks):
    """A callback may make calls itself; it runs when the call has been made, without a wait."""
    ranks(2, """
start()
x, y = filled(10), filled(4)
done = dist.all_reduce(x, async_op=True).get_future().then(lambda found: found.value()[0] + 1)
assert (done.wait() == total + 1).all()

def again(found):
    dist.all_reduce(y)
    return y

done = dist.all_reduce(y, async_op=True).get_future().then(again)
assert (done.wait() == 2 * total).all()

def waits(found):
    # As the hook of PowerSGD does, on the thread that makes the calls.
    return dist.all_reduce(y, async_op=True).get_future().wait()[0]

done = dist.all_reduce(filled(4), async_op=True).get_future().then(waits)
assert (done.wait() == 4 * total).all()
work = dist.all_reduce(x, async_op=True)
work.wait()
assert (work.get_future().wait()[0] == 2 * total).all()
with torch.inference_mode():
    parts = [torch.zeros(3) for _ in range(2)]
    work = dist.all_gather(parts, filled(3), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
assert work.wait() and (parts[1] == 2).all()
say(rank=rank)
""")  # fmt: skip


def test_errors_come_from_wait(ranks):
    facts = ranks(2, """
start()
wrong = dist.all_reduce(filled(4).to(torch.float8_e5m2fnuz), async_op=True)
failed = error_of(wrong.wait)
assert not wrong.is_success() and wrong.is_completed() and wrong.exception() is not None
in_future = error_of(lambda: wrong.get_future().wait())
x = filled(4)
assert dist.all_reduce(x, async_op=True).wait() and (x == total).all()
late = error = None
if rank == 0:
    kccl_torch.communicator("cpu").timeout = 1.5
    work = dist.all_reduce(x, async_op=True)
    late = error_of(lambda: work.wait(timedelta(seconds=0.3)))
    future = work.get_future()
    error = error_of(work.wait)
    error_of(future.wait)
else:
    time.sleep(3)
say(rank=rank, failed=failed, in_future=in_future, late=late, error=error)
""")  # fmt: skip
    for fact in facts.values():
        assert fact["failed"][0] == "InvalidArgument" and "float8_e5m2fnuz" in fact["failed"][1]
        assert "float8_e5m2fnuz" in fact["in_future"][1]
    assert facts[0]["late"][0] == "Timeout" and "wait() was given 0.3 s" in facts[0]["late"][1]
    assert facts[0]["error"][0] == "Timeout" and "peer 1 did not arrive" in facts[0]["error"][1]


def test_what_nobody_waits_for_is_made_before_the_group_is_closed(ranks):
    ranks(2, """
start()
xs = [filled(20) for _ in range(50)]
for x in xs:
    dist.all_reduce(x, async_op=True)
dist.destroy_process_group()
assert all((x == total).all() for x in xs)
say(rank=rank)
""")  # fmt: skip


def test_abort_ends_calls_that_are_under_way(ranks):
    facts = ranks(2, """
start()
dist.barrier()
error = None
if rank == 0:
    works = [dist.all_reduce(filled(4), async_op=True) for _ in range(3)]
    time.sleep(0.2)
    began = time.monotonic()
    dist.group.WORLD.abort()
    error = [error_of(work.wait) for work in works]
    assert time.monotonic() - began < 5
say(rank=rank, error=error)
""")  # fmt: skip
    assert len(facts[0]["error"]) == 3
