"""Ranks on several machines without MPI. KCCL_RANKS_PER_NODE pretends the machines."""

import pytest
from torch_ranks import starter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


@pytest.mark.takes(20)
def test_every_call_between_machines_of_3_ranks_and_1(ranks):
    """Collectives, messages, groups, DistributedDataParallel and FSDP2."""
    facts = ranks(4, """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

start()
Op = dist.ReduceOp
everyone = torch.arange(1, 5)
wanted = {Op.SUM: 10, Op.PRODUCT: 24, Op.MIN: 1, Op.MAX: 4}
for dtype in (torch.bfloat16, torch.float64, torch.uint8):
    also = {Op.AVG: 2.5} if dtype.is_floating_point else {Op.BOR: 7, Op.BXOR: 4, Op.BAND: 0}
    for op, want in {**wanted, **also}.items():
        x = filled(70_000 if op == Op.SUM else 3, dtype=dtype)
        dist.all_reduce(x, op=op)
        assert (x == want).all(), (dtype, op, x)
x = filled(3)
dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
assert (x == 5).all()
assert error_of(lambda: dist.all_reduce(filled(2, dtype=torch.int32), op=Op.AVG))[0] == (
    "InvalidArgument"
)
# The same bits on all ranks.
torch.manual_seed(rank)
x = torch.randn(1000, dtype=torch.bfloat16)
dist.all_reduce(x)
parts = [torch.empty_like(x) for _ in range(4)]
dist.all_gather(parts, x)
assert all(torch.equal(x, part) for part in parts)

for root in (1, 3):
    x = filled(5, dtype=torch.complex64)
    dist.broadcast(x, root)
    assert (x == root + 1).all()
    x = filled(5)
    dist.reduce(x, root)
    assert (x == (10 if rank == root else rank + 1)).all()
    parts = [torch.zeros(3, dtype=torch.bool) for _ in range(4)] if rank == root else None
    dist.gather(torch.full((3,), rank % 2 == 0), parts, root)
    assert rank != root or [bool(part[0]) for part in parts] == [True, False] * 2
    out = torch.zeros(2)
    given = [torch.full((2,), float(each)) for each in range(4)] if rank == root else None
    dist.scatter(out, given, root)
    assert (out == rank).all()
whole = torch.zeros(8)
dist.all_gather_into_tensor(whole, filled(2))
assert torch.equal(whole, everyone.repeat_interleave(2).float())
parts = [torch.zeros(each + 1) for each in range(4)]
dist.all_gather(parts, filled(rank + 1))
assert all((part == each + 1).all() for each, part in enumerate(parts))
out = torch.zeros(2)
dist.reduce_scatter_tensor(out, torch.arange(8.0))
assert torch.equal(out, 4 * torch.arange(8.0)[2 * rank : 2 * rank + 2])
out = torch.zeros(rank + 1)
dist.reduce_scatter(out, [filled(each + 1) for each in range(4)])
assert (out == 10).all()
out = torch.zeros(4)
dist.all_to_all_single(out, filled(4))
assert torch.equal(out, everyone.float())
outs = [torch.zeros(each + 1) for each in range(4)]
dist.all_to_all(outs, [filled(rank + 1) for _ in range(4)])
assert all((out == each + 1).all() for each, out in enumerate(outs))
layout = {"memory_format": torch.channels_last}
x = filled(2, 3, 4, 5).contiguous(**layout)
dist.all_reduce(x)
assert (x == 10).all() and x.is_contiguous(**layout)
work = dist.all_reduce(y := filled(4), async_op=True)
assert work.wait() and (y == 10).all()
dist.barrier()
objects = [None] * 4
dist.all_gather_object(objects, {"rank": rank})
assert objects[3] == {"rank": 3}

right, left = (rank + 1) % 4, (rank - 1) % 4
got = torch.zeros(2)
calls = [dist.P2POp(dist.isend, filled(2), right), dist.P2POp(dist.irecv, got, left)]
for work in dist.batch_isend_irecv(calls):
    work.wait()
assert (got == left + 1).all()
if rank == 0:
    assert dist.recv(got, tag=3) == 3 and (got == 4).all()
elif rank == 3:
    dist.send(filled(2), 0, tag=3)

# Groups on one of the machines, and across both.
for members in ([0, 1, 2], [1, 3]):
    part = dist.new_group(members)
    if rank in members:
        dist.all_reduce(x := filled(3), group=part)
        assert (x == sum(each + 1 for each in members)).all()
kept = kccl_torch.communicator("cpu", dist.new_group([0, 1, 2])) if rank < 3 else (
    dist.new_group([0, 1, 2])
)
refused = error_of(lambda: kccl_torch.communicator("cpu"))
on_gpu = error_of(lambda: dist.group.WORLD.communicator(torch.device("cuda", 0)))

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
parallel = torch.nn.parallel.DistributedDataParallel(model)
parallel(torch.full((1, 3), float(rank))).sum().backward()
assert torch.allclose(model.weight.grad, torch.full((2, 3), 1.5))
model = fully_shard(torch.nn.Linear(3, 8), mesh=init_device_mesh("cpu", (4,)))
model(torch.full((1, 3), float(rank))).sum().backward()
assert torch.allclose(model.weight.grad.full_tensor(), torch.full((8, 3), 1.5))
dist.group.WORLD.set_timeout(timedelta(seconds=30))
dist.destroy_process_group()
say(rank=rank, refused=refused, on_gpu=on_gpu)
""", KCCL_RANKS_PER_NODE="3")  # fmt: skip
    for fact in facts.values():
        assert fact["refused"][0] == "InvalidArgument" and "several machines" in fact["refused"][1]
        assert fact["on_gpu"][0] == "NotImplementedError" and "cuda:nccl" in fact["on_gpu"][1]


def test_waits_for_a_rank_of_another_machine_end(ranks):
    """Rank 3 is late for one call: the leaders' wait ends, and so do their machine's ranks'."""
    facts = ranks(4, """
start(timeout=timedelta(seconds=2))
dist.all_reduce(filled(2))
error, began = None, time.monotonic()
if rank < 2:
    error = error_of(lambda: dist.all_reduce(filled(2)))
    assert time.monotonic() - began < 8
else:
    time.sleep(5)
say(rank=rank, error=error)
os._exit(0)
""", KCCL_RANKS_PER_NODE="2")  # fmt: skip
    assert facts[0]["error"][0] == "Timeout" and "between machines" in facts[0]["error"][1], facts
    assert facts[1]["error"][0] in ("Timeout", "PeerLost"), facts


def test_ranks_must_agree_on_the_machines(ranks):
    facts = ranks(2, """
os.environ["KCCL_RANKS_PER_NODE"] = str(1 + rank)
say(rank=rank, error=error_of(start))
""")  # fmt: skip
    for fact in facts.values():
        assert fact["error"][0] == "InvalidArgument" and "is 1, 2 on the ranks" in fact["error"][1]


def test_calls_that_differ_between_machines_and_averages_of_short_floats(ranks):
    """With KCCL_CHECK=1 all ranks get the error, and the group goes on. abort() does not wait for
    gloo.
    """
    facts = ranks(3, """
start(timeout=timedelta(seconds=20))
x = torch.full((3,), 40_000.0, dtype=torch.float16)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert (x == 40_000).all(), x
errors = [
    error_of(lambda: dist.all_reduce(filled(2 if rank < 2 else 3))),
    error_of(lambda: dist.broadcast(filled(2), 0) if rank < 2 else dist.all_reduce(filled(2))),
]
dist.all_reduce(x := filled(2))
assert (x == 6).all()
late = None
if rank == 2:
    works = [dist.all_reduce(filled(2), async_op=True) for _ in range(2)]
    time.sleep(0.2)
    began = time.monotonic()
    dist.group.WORLD.abort()
    assert works[1].is_completed() and not works[1].is_success()
    assert time.monotonic() - began < 2.9
    late = type(works[1].exception()).__name__
else:
    time.sleep(3)
say(rank=rank, errors=errors, late=late)
os._exit(0)
""", KCCL_RANKS_PER_NODE="2", KCCL_CHECK="1")  # fmt: skip
    for fact in facts.values():
        (first, lengths), (second, calls) = fact["errors"]
        assert first == second == "InvalidArgument"
        assert "3 elements" in lengths and "rank 2 calls all_reduce" in calls, fact
    assert facts[2]["late"] == "Error"


def test_containers_of_one_machine_are_refused():
    import kccl
    from kccl.interop.torch_machines import machines_of

    assert machines_of(["a 1", "b 1", "a 1"], 0) == [[0, 2], [1]]
    with pytest.raises(kccl.BackendError, match="ranks 0 and 2 are in containers"):
        machines_of(["a 1", "b 1", "a 2"], 0)
