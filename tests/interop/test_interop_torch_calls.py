"""Every call of torch.distributed beyond DDP's: to a root, between pairs, messages, objects."""

import pytest
from torch_ranks import starter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


@pytest.mark.parametrize("world_size", [3])
def test_calls_to_and_from_a_root_and_between_all(world_size, ranks):
    facts = ranks(world_size, """
start()
Op, root = dist.ReduceOp, world_size - 1
types = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64, torch.complex32]
types += [torch.float8_e4m3fn, torch.float8_e4m3fnuz]

def same(x, y):
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))

def of(who, count, dtype):
    raw = torch.arange(count * dtype.itemsize) * 5 + who + 1
    return (raw % (2 if dtype is torch.bool else 120)).to(torch.uint8).view(dtype)

for dtype in types:
    x = of(rank, 6, dtype).view(2, 3)
    everyone = [of(each, 6, dtype).view(2, 3) for each in range(world_size)]
    parts = [torch.empty_like(x) for _ in range(world_size)] if rank == root else None
    dist.gather(x, parts, dst=root)
    assert rank != root or all(map(same, parts, everyone)), dtype
    # PyTorch has it from 2.14 on.
    if hasattr(dist, "gather_single"):
        whole = torch.empty(2 * world_size, 3, dtype=dtype)
        dist.gather_single(x, whole, dst=root)
        assert rank != root or same(whole, torch.cat(everyone)), dtype
    out = torch.empty_like(x)
    dist.scatter(out, everyone if rank == root else None, src=root)
    assert same(out, x), dtype
    # Even, with sizes of rows, and lists; what rank a sends to rank b has a + b rows.
    out = torch.empty(world_size, 2, dtype=dtype)
    dist.all_to_all_single(out, of(rank, 2 * world_size, dtype).view(world_size, 2))
    mine = slice(2 * rank, 2 * rank + 2)
    wanted = [of(each, 2 * world_size, dtype)[mine] for each in range(world_size)]
    assert same(out, torch.cat(wanted))
    counts = [rank + each for each in range(world_size)]
    wanted = [of(10 * each + rank, 2 * (each + rank), dtype) for each in range(world_size)]
    given = [of(10 * rank + each, 2 * (each + rank), dtype) for each in range(world_size)]
    out = torch.empty(sum(counts), 2, dtype=dtype)
    dist.all_to_all_single(out, torch.cat(given).view(-1, 2), counts, counts)
    assert same(out, torch.cat(wanted)), dtype
    outs = [torch.empty_like(each) for each in wanted]
    dist.all_to_all(outs, given)
    assert all(map(same, outs, wanted)), dtype
    # Lengths of each rank's own.
    outs = [torch.empty(each + 1, dtype=dtype) for each in range(world_size)]
    dist.all_gather(outs, of(rank, rank + 1, dtype))
    assert all(same(each, of(who, who + 1, dtype)) for who, each in enumerate(outs))
    if not dtype.is_complex and "fnuz" not in str(dtype):
        x = filled(4).to(dtype)
        dist.reduce(x, root, op=Op.MAX)
        assert (x.float() == (rank + 1 if dtype is not torch.bool else 1)).all() or rank == root
x = filled(5)
dist.reduce(x, root)
assert (x == (total if rank == root else rank + 1)).all()
out = torch.zeros(rank + 1)
dist.reduce_scatter(out, [filled(each + 1) for each in range(world_size)])
assert (out == total).all()
# Each rank's input is multiplied, and the sum rounded once.
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    premul = dist._make_nccl_premul_sum(0.3)
    x = filled(6, dtype=dtype)
    dist.all_reduce(x, op=premul)
    assert torch.allclose(x, torch.full_like(x, 0.3 * total))
    x = filled(2 * world_size, dtype=dtype)
    dist.reduce_scatter_tensor(out2 := torch.empty(2, dtype=dtype), x, op=premul)
    assert torch.allclose(out2, torch.full_like(out2, 0.3 * total))
assert dist.group.WORLD._get_sequence_number_for_group() > 0

x = filled(4)
errors = {
    "sizes": error_of(lambda: dist.all_to_all_single(x, x, [1] * world_size, [1] * world_size)),
    "rows": error_of(lambda: dist.all_to_all_single(filled(7), filled(7))),
    "list": None if rank else error_of(lambda: dist.gather(x, [x] * (world_size - 1))),
    "types": error_of(lambda: dist.all_to_all([x] * world_size, [x.double()] * world_size)),
}
dist.barrier()
say(rank=rank, **errors)
""")  # fmt: skip
    assert "Split sizes doesn't match total dim 0 size" in facts[0]["sizes"][1]
    assert "does not divide equally across group size" in facts[0]["rows"][1]
    assert "must have" in facts[0]["list"][1]
    assert facts[0]["types"][0] in ("InvalidArgument", "ValueError")


def test_messages(ranks):
    """In any order with collectives, of any type, from any rank, coalesced, and of objects."""
    facts = ranks(3, """
start()
right, left = (rank + 1) % 3, (rank - 1) % 3
# Ranks 0 and 1 need nothing of rank 2.
pair = torch.arange(50_000.0) + rank
if rank == 0:
    dist.send(pair, 1)
if rank == 1:
    dist.recv(pair, 0)
    assert pair[0] == 0
for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64,
              torch.float8_e5m2fnuz):
    for count in (0, 1, 40_000):
        x, wanted = (torch.full((count,), float(each)).to(dtype) for each in (rank, left))
        y = torch.empty(count).to(dtype)
        if rank == 0:
            dist.send(x, right, tag=4)
            dist.recv(y, left, tag=4)
        else:
            dist.recv(y, left, tag=4)
            dist.send(x, right, tag=4)
        assert torch.equal(y.view(torch.uint8), wanted.view(torch.uint8)), (dtype, count)
# A long message is under way while its ranks are in collectives, before and after it is received.
for first in ("collective", "message"):
    x, y = torch.full((300_000,), float(rank)), torch.empty(300_000)
    sent = dist.isend(x, right)
    if first == "collective":
        dist.barrier()
    dist.recv(y, left)
    if first == "message":
        dist.barrier()
    assert sent.wait() and sent.is_completed() and (y == left).all()
# From any rank, and which it was.
if rank == 0:
    froms = [dist.recv(torch.empty(1)) for _ in range(2)]
    assert sorted(froms) == [1, 2]
    work = dist.irecv(torch.empty(1), 1, tag=5)
    assert work.wait() and work.source_rank() == 1
else:
    dist.send(torch.ones(1), 0)
    if rank == 1:
        # Its tag keeps it from being one of the two that come from any rank.
        dist.send(torch.ones(1), 0, tag=5)
# A message to a rank of a group by its number in the group.
group = dist.new_group([1, 2])
if rank:
    x = torch.full((3,), float(rank))
    other = torch.empty(3)
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, 3 - rank, group=group),
        dist.P2POp(dist.irecv, other, 3 - rank, group=group),
    ]):
        work.wait()
    assert (other == 3 - rank).all()
xs, ys = torch.full((2, 70_000), float(rank)), torch.empty(2, 70_000)
ops = [dist.P2POp(dist.isend, xs[0], right), dist.P2POp(dist.irecv, ys[0], left)]
ops += [dist.P2POp(dist.irecv, ys[1], right), dist.P2POp(dist.isend, xs[1], left)]
works = dist.batch_isend_irecv(ops)
for work in works:
    assert work.wait()
assert (ys[0] == left).all() and (ys[1] == right).all()
done = []
future = dist.irecv(ys[0], left).get_future().then(lambda each: done.append(each.value()))
time.sleep(0.05 * rank)
dist.isend(xs[1], right)
future.wait()
assert done and (ys[0] == left).all()

objects = [None] * 3
dist.gather_object({"rank": rank}, objects if rank == 1 else None, dst=1)
assert rank != 1 or objects == [{"rank": each} for each in range(3)]
mine = [None]
dist.scatter_object_list(mine, ["a", ("b",), {"c": 1}] if rank == 2 else None, src=2)
assert mine[0] == ["a", ("b",), {"c": 1}][rank]
if rank == 0:
    dist.send_object_list([{"x": 1}, "text" * 5000], 2)
if rank == 2:
    got = [None, None]
    assert dist.recv_object_list(got, 0) == 0 and got == [{"x": 1}, "text" * 5000]
# wait() with a timeout leaves the message under way.
work = dist.irecv(ys[0], left, tag=9)
slow = error_of(lambda: work.wait(timedelta(seconds=0.2)))
dist.barrier()
sent = dist.isend(xs[1], right, tag=9)
assert not work.wait() is False and work.is_success() and sent.wait()
dist.barrier()
length = None
if rank == 0:
    dist.send(torch.ones(4), 1, tag=11)
if rank == 1:
    length = error_of(lambda: dist.recv(torch.empty(3), 0, tag=11))
say(rank=rank, slow=slow, length=length)
""")  # fmt: skip
    assert facts[0]["slow"][0] == "Timeout" and "Operation timed out!" in facts[0]["slow"][1]
    assert facts[1]["length"][0] == "InvalidArgument" and "16" in facts[1]["length"][1]


def test_groups_and_what_ends_them(ranks):
    """Parts, names, subgroups, monitored_barrier, time-outs in futures, abort."""
    facts = ranks(3, """
start()
world = dist.group.WORLD
assert world.group_desc == "default_pg" and world.name() == "kccl" and world.group_name
part = world.split_group([2, 0], timeout=timedelta(seconds=9), group_name="part")
assert (part is None) == (rank == 1)
if part is not None:
    assert part.size() == 2 and part.rank() == {2: 0, 0: 1}[rank] and part.group_name == "part"
    x = filled(3)
    part.allreduce([x], dist.AllreduceOptions()).wait()
    assert (x == 4).all()
    part.shutdown()
mine, groups = dist.new_subgroups(1)
assert len(groups) == 3 and mine.size() == 1
dist.all_reduce(x := filled(2), group=mine)
assert (x == rank + 1).all()
backend = world._get_backend(torch.device("cpu"))
assert backend.supports_splitting and backend.supports_coalescing
assert not backend.supports_time_estimate
try:
    dist.monitored_barrier()
except ValueError as error:
    # Before 2.14 PyTorch's function refuses each backend but gloo.
    assert "only implemented for GLOO" in str(error)
world.monitored_barrier(wait_all_ranks=True)
late = None
if rank != 2:
    call = lambda: world.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    late = error_of(call)
time.sleep(0 if rank != 2 else 3)
dist.barrier()

# Its errors are PyTorch's, in wait() and in the future of a call with async_op, and KCCL's.
slow = dist.new_group(timeout=timedelta(seconds=1))
found = []
if rank == 0:
    work = dist.all_reduce(filled(4), group=slow, async_op=True)
    assert not work.is_success()
    for call in (work.wait, lambda: work.get_future().wait(), lambda: dist.barrier(group=slow)):
        try:
            call()
        except Exception as error:
            found.append(
                [isinstance(error, kind) for kind in (dist.DistBackendError, kccl.Timeout)]
                + [str(error)]
            )
# Some versions of PyTorch have only the group's own method.
getattr(dist, "set_timeout", world.set_timeout)(timedelta(seconds=60))
dist.barrier()
assert kccl_torch.communicator("cpu").timeout == 60
# abort() ends what waits for it, messages included.
lost = None
if rank == 1:
    world.abort()
else:
    lost = error_of(lambda: dist.recv(torch.empty(3), 1))
say(rank=rank, late=late, found=found, lost=lost)
""")  # fmt: skip
    kind, text = facts[0]["late"]
    assert kind == "RuntimeError" and "Ranks 2 failed to pass monitoredBarrier in 1000 ms" in text
    assert "Please check rank 0 logs for faulty rank" in facts[1]["late"][1]
    of_call, of_future, of_barrier = facts[0]["found"]
    assert of_call[:2] == [True, True] and "did not arrive" in of_call[2]
    assert "did not arrive" in of_future[2]
    assert of_barrier[0]
    assert facts[0]["lost"][0] == facts[2]["lost"][0] == "PeerLost"


def test_a_coalesced_collective_that_fails_says_so(ranks):
    facts = ranks(2, """
start(timeout=timedelta(seconds=2))
dist.barrier()
x, y = filled(3), filled(2)
with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as both:
    dist.all_reduce(x)
    dist.all_reduce(y)
both.wait()
right = bool((x == total).all() and (y == total).all())
error = None
if rank == 0:
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as lone:
        dist.all_reduce(x)
    error = error_of(lone.wait)
else:
    time.sleep(4)
say(rank=rank, right=right, error=error)
os._exit(0)
""")  # fmt: skip
    assert facts[0]["right"] and facts[1]["right"]
    assert "peer 1" in facts[0]["error"][1]


def test_threads_of_a_rank_wait_for_messages_at_the_same_time(ranks):
    """While one thread waits for a message, the other one sends what the peer needs first."""
    facts = ranks(2, """
start()
x, y = filled(1), torch.zeros(1)
if rank == 0:
    import threading
    waiting = threading.Thread(target=lambda: dist.recv(y, 1, tag=7))
    waiting.start()
    time.sleep(0.2)
    dist.send(x, 1)
    waiting.join()
else:
    dist.recv(y, 0)
    dist.send(x, 0, tag=7)
dist.destroy_process_group()
say(rank=rank, got=float(y[0]))
""")  # fmt: skip
    assert [facts[rank]["got"] for rank in (0, 1)] == [2, 1]
