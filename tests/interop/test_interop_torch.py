"""The backend "kccl" of torch.distributed, with tensors on the host; ranks are processes."""

import pytest
from torch_ranks import starter

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_reduce_broadcast_and_barrier(world_size, ranks):
    facts = ranks(world_size, """
start()
Op = dist.ReduceOp
everyone = torch.arange(1, world_size + 1)
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16,
              torch.int32, torch.int64):
    wanted = {Op.SUM: everyone.sum(), Op.PRODUCT: everyone.prod(), Op.MIN: 1, Op.MAX: world_size}
    if dtype.is_floating_point:
        wanted[Op.AVG] = total / world_size
    for op, want in wanted.items():
        for shape in ((), (1,), (3, 5), (2, 0), (40_000,)):
            x = filled(*shape, dtype=dtype)
            assert dist.all_reduce(x, op=op) is None
            assert x.dtype is dtype and x.shape == shape and (x == want).all(), (dtype, op, x)
    for root in range(world_size):
        x = filled(7, 3, dtype=dtype)
        dist.broadcast(x, src=root)
        assert (x == root + 1).all()
x = torch.nn.Parameter(filled(5))
dist.all_reduce(x)
assert (x == total).all()

time.sleep(0.3 * rank)
arrived = time.monotonic()
dist.barrier()
left = time.monotonic()
assert dist.get_backend() == "kccl"
assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
dist.destroy_process_group()
say(rank=rank, arrived=arrived, left=left)
""")  # fmt: skip
    # The machine's ranks have one clock.
    arrived = max(each["arrived"] for each in facts.values())
    assert min(each["left"] for each in facts.values()) >= arrived


def test_async_calls_return_work(ranks):
    ranks(2, """
start()
x = filled(100)
work = dist.all_reduce(x, async_op=True)
assert work.wait() is True
assert work.is_completed() and work.is_success() and work.exception() is None
work.synchronize()
assert work.result()[0] is x and (x == total).all()
doubled = dist.broadcast(x, 0, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
assert (doubled.wait() == 2 * total).all()
work = dist.barrier(async_op=True)
assert work.wait() and work.is_completed()
with torch.autograd.profiler.profile() as trace:
    dist.all_reduce(x, async_op=True).get_future().wait()
    dist.barrier()
    dist.recv(x, 1) if rank == 0 else dist.send(x, 0)
names = {each.key for each in trace.key_averages()}
message = "kccl:recv 0<-1" if rank == 0 else "kccl:send 1->0"
assert {"kccl:all_reduce", "kccl:barrier", message} <= names, names

dist.destroy_process_group()
# It was made before the group was closed.
assert work.exception() is None and work.wait()
say(rank=rank)
""")  # fmt: skip


def test_groups_are_independent(ranks):
    ranks(3, """
start()
pair = dist.new_group([0, 2])
backwards = dist.new_group([2, 1, 0])
alone = [dist.new_group([each]) for each in range(3)]
x = filled(9)
if rank != 1:
    dist.all_reduce(x, group=pair)
    assert (x == 4).all()
    dist.broadcast(x, src=2, group=pair)
    dist.destroy_process_group(pair)
dist.all_reduce(x, group=alone[rank])
dist.all_reduce(x, op=dist.ReduceOp.MAX)
assert (x == 4).all()
x = filled(9)
dist.broadcast(x, src=2, group=backwards)
assert (x == 3).all()
comm = kccl_torch.communicator("cpu", backwards)
assert comm.world_size == 3 and comm is not kccl_torch.communicator("cpu")
assert comm.launcher == "torch.distributed"
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("ranks_per_node", ["0", "1"])
def test_a_group_of_the_same_name_in_the_same_store(ranks_per_node, ranks):
    ranks(2, """
start()
for turn in range(5):
    x = filled(3)
    dist.all_reduce(x)
    assert (x == total).all()
    part = dist.new_group([turn % 2])
    if rank == turn % 2:
        dist.all_reduce(x, group=part)
    dist.destroy_process_group()
    if turn < 4:
        start()
say(rank=rank)
""", KCCL_RANKS_PER_NODE=ranks_per_node)  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_gather_and_reduce_scatter(world_size, ranks):
    ranks(world_size, """
start()
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    x = filled(2, 5, dtype=dtype)
    everyone = torch.stack([torch.full_like(x, each + 1) for each in range(world_size)])
    parts = [torch.zeros_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    assert torch.equal(torch.stack(parts), everyone)
    whole = torch.zeros(2 * world_size, 5, dtype=dtype)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    assert work.wait() and torch.equal(whole, everyone.view(-1, 5))

    x = torch.arange(4 * world_size, dtype=dtype) + rank
    mine = slice(4 * rank, 4 * rank + 4)
    want = torch.arange(4 * world_size)[mine] * world_size + total - world_size
    out = torch.zeros(4, dtype=dtype)
    dist.reduce_scatter_tensor(out, x)
    assert (out == want).all()
    out.zero_()
    dist.reduce_scatter(out, list(x.chunk(world_size)))
    assert (out == want).all()
    dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.MAX)
    assert (out == torch.arange(4 * world_size)[mine] + world_size - 1).all()
name, text = error_of(lambda: dist.all_gather([filled(3)] * world_size, filled(4)))
assert name == "InvalidArgument" and "must be torch.float32 (4,)" in text
say(rank=rank)
""")  # fmt: skip


def test_what_is_not_supported_is_an_error_that_says_so(ranks):
    facts = ranks(2, """
start()
x, premul = filled(4), dist._make_nccl_premul_sum
other = dist.new_group(backend="cuda:kccl")
calls = {
    "op": lambda: dist.all_reduce(filled(4, dtype=torch.int64), op=premul(2.5)),
    "avg": lambda: dist.all_reduce(filled(4, dtype=torch.int64), op=dist.ReduceOp.AVG),
    "dtype": lambda: dist.all_reduce(filled(4).to(torch.float8_e5m2fnuz)),
    "layout": lambda: dist.all_reduce(x.to_sparse()),
    "strides": lambda: dist.all_reduce(filled(4, 4)[:, 1]),
    "device": lambda: dist.all_reduce(x, group=other),
    "backend": lambda: kccl_torch.communicator("cpu", dist.new_group(backend="gloo")),
    "meta": lambda: kccl_torch.communicator("meta"),
    "window": lambda: dist.group.WORLD.new_window(x),
    "allocator": lambda: dist.group.WORLD.mem_allocator,
}
assert not dist.group.WORLD.supports_tensor_alloc(x.device)
errors = {what: error_of(call) for what, call in calls.items()}
dist.all_reduce(x)
assert (x == total).all()
say(rank=rank, **errors)
""")  # fmt: skip
    wanted = {
        "op": ("InvalidArgument", "op is kccl.premul_sum(2.5) and x has dtype int64: the factor "),
        "avg": ("InvalidArgument", "must be a float"),
        "dtype": ("InvalidArgument", "torch.float8_e5m2fnuz, must be one of float32"),
        "layout": ("InvalidArgument", "must be torch.strided"),
        "strides": ("InvalidArgument", "tensor has shape (4,) and strides (4,): its elements do"),
        "device": ("NotImplementedError", "made for cuda:kccl, and its tensor is on cpu"),
        "backend": ("InvalidArgument", 'must be one of backend "kccl"'),
        "meta": ("InvalidArgument", "device is meta, must be one of cpu, cuda"),
        "window": ("NotImplementedError", "Backend kccl does not support new_window"),
        "allocator": ("NotImplementedError", "Backend kccl does not support mem_allocator"),
    }
    for fact in facts.values():
        for what, (name, text) in wanted.items():
            assert fact[what][0] == name, fact[what]
            assert text in fact[what][1]


def test_the_groups_timeout_holds(ranks):
    facts = ranks(2, """
start()
met = dist.new_group(timeout=timedelta(seconds=2))
dist.all_reduce(filled(4), group=met)
error = waited = None
if rank == 0:
    began = time.monotonic()
    error = error_of(lambda: dist.all_reduce(filled(4), group=met))
    waited = [time.monotonic() - began]
    began = time.monotonic()
    # Rank 1 does not make this group.
    error += error_of(lambda: dist.new_group(timeout=timedelta(seconds=2)))
    waited.append(time.monotonic() - began)
    assert (met.get_error().name, dist.group.WORLD.get_error().name) == ("TIMEOUT", "SUCCESS")
else:
    time.sleep(5)
say(rank=rank, error=error, waited=waited)
""")  # fmt: skip
    kind_of_call, text_of_call, kind, text = facts[0]["error"]
    assert kind == kind_of_call == "Timeout"
    assert "waited 2 s for rank 1 to make this process group" in text
    assert "peer 1 did not arrive" in text_of_call
    assert all(1.9 < waited < 10 for waited in facts[0]["waited"])


def test_abort_ends_the_peers_waits(ranks):
    facts = ranks(2, """
start()
dist.all_reduce(filled(4))
if rank == 1:
    time.sleep(0.5)
    dist.group.WORLD.abort()
error = error_of(lambda: dist.all_reduce(filled(4)))
say(rank=rank, error=error, kind=dist.group.WORLD.get_error().name)
""")  # fmt: skip
    assert facts[0]["error"][0] == "PeerLost" and facts[0]["kind"] == "REMOTE_ERROR"
    assert facts[1]["error"][0] == "Error" and facts[1]["kind"] == "COMM_ERROR"


def test_distributed_data_parallel(ranks):
    ranks(2, """
start()
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
parallel = torch.nn.parallel.DistributedDataParallel(model)
for step in range(3):
    model.zero_grad()
    parallel(torch.full((1, 3), float(rank + step))).sum().backward()
    # The mean of the ranks' inputs.
    assert torch.allclose(model.weight.grad, torch.full((2, 3), 0.5 + step)), model.weight.grad

def hooked(kind):
    model = torch.nn.Linear(3, 2)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel._register_builtin_comm_hook(kind)
    parallel(torch.full((1, 3), float(rank))).sum().backward()
    return model.weight.grad

assert (hooked(dist.BuiltinCommHookType.ALLREDUCE) == 0.5).all()
# It takes no future of a group in Python: README says so until this fails.
kind, text = error_of(lambda: hooked(dist.BuiltinCommHookType.FP16_COMPRESS))
assert kind == "RuntimeError" and "allreduce should return TensorList" in text, text
say(rank=rank)
""")  # fmt: skip


def test_tensors_of_bfloat16_in_the_collectives_of_a_communicator():
    """NumPy lacks the type, so NumPy cannot read the tensor's memory."""

    def main(comm):
        for shape in ((), (5,), (3, 4), (0, 2)):
            for _ in range(2):
                x = torch.full(shape, comm.rank + 1, dtype=torch.bfloat16)
                out = torch.zeros_like(x)
                assert comm.all_reduce(x, out=out) is out
                assert comm.all_reduce(x) is x
                assert (x == 3).all() and (out == 3).all()
        everyone = comm.all_gather(torch.full((4,), comm.rank, dtype=torch.bfloat16))
        assert everyone.astype(float).tolist() == [[0] * 4, [1] * 4]
        x = torch.ones(3, 4, dtype=torch.bfloat16).T
        assert comm.all_reduce(x) is x and (x == 2).all() and not x.is_contiguous()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize(
    ("view", "what"),
    [
        (lambda x: x._neg_view(), "negates"),
        (lambda x: x.to(torch.bfloat16)._neg_view(), "negates"),
        (lambda x: torch.complex(x, x).conj().imag, "negates"),
        (lambda x: torch.complex(x, x).conj(), "conjugates"),
    ],
)
def test_views_that_change_what_is_in_memory_are_refused(view, what):
    """Also on the fast path, which an earlier call with a tensor has opened."""

    def main(comm):
        comm.all_reduce(torch.ones(3))
        with pytest.raises(kccl.InvalidArgument, match=f"x is a view that {what} the memory"):
            comm.all_reduce(view(torch.ones(3)))

    kccl.run_threads(main, 2)


def test_a_view_that_conjugates_is_refused_after_calls_of_its_type():
    def main(comm):
        x = torch.complex(torch.ones(3), torch.ones(3))
        out = torch.zeros(6, dtype=x.dtype)
        comm.all_gather(x, out=out)
        with pytest.raises(kccl.InvalidArgument, match="x is a view that conjugates the memory"):
            comm.all_gather(x.conj(), out=out)
        assert comm.all_gather(x.conj().resolve_conj(), out=out)[0] == 1 - 1j

    kccl.run_threads(main, 2)
