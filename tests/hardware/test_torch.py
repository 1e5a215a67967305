"""kccl.interop.torch on GPUs: streams, CUDA graphs, torch.compile; ranks are processes.

tests/interop/test_interop_torch.py has the tests of what is the same on every device.
"""

import pytest
from torch_ranks import starter

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cuda")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_distributed(world_size, ranks):
    ranks(world_size, """
start(device_id=torch.device("cuda", rank))
Op = dist.ReduceOp
wanted = {Op.SUM: total, Op.MIN: 1, Op.MAX: world_size, Op.AVG: total / world_size}
for dtype in (torch.float32, torch.bfloat16):
    for op, want in wanted.items():
        for count in (1, 1000, 100_000):
            x = filled(count, dtype=dtype)
            dist.all_reduce(x, op=op)
            assert (x == want).all(), (dtype, op, count)
for root in range(world_size):
    x = filled(77, dtype=torch.int64)
    dist.broadcast(x, src=root)
    assert (x == root + 1).all()

# Tensors of the same group on the host.
x = torch.full((5,), rank + 1)
dist.all_reduce(x)
assert (x == total).all()

sides = [list(range(side, world_size, 2)) for side in range(min(world_size, 2))]
parts = [dist.new_group(members) for members in sides]
x = filled(500)
dist.all_reduce(x, group=parts[rank % 2])
assert (x == sum(member + 1 for member in sides[rank % 2])).all()

dist.barrier()
began = time.monotonic()
time.sleep(0.3 * rank)
dist.barrier()
assert time.monotonic() - began >= 0.2 * (world_size - 1)
kccl_torch.communicator("cuda").check()
dist.destroy_process_group()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_gather_and_reduce_scatter(world_size, ranks):
    ranks(world_size, """
start()
x = filled(6, 10)
everyone = torch.stack([torch.full_like(x, each + 1) for each in range(world_size)])
parts = [torch.zeros_like(x) for _ in range(world_size)]
dist.all_gather(parts, x)
assert torch.equal(torch.stack(parts), everyone)
whole = x.new_zeros(6 * world_size, 10)
dist.all_gather_into_tensor(whole, x)
assert torch.equal(whole, everyone.view(-1, 10))
out = torch.zeros_like(x)
dist.reduce_scatter_tensor(out, whole)
assert (out == world_size * (rank + 1)).all()
dist.reduce_scatter(out, list(everyone))
assert (out == world_size * (rank + 1)).all()

kccl_torch.register(kccl_torch.communicator("cuda"))
assert torch.equal(kccl_torch.all_gather(x), everyone)
assert (kccl_torch.reduce_scatter(whole) == world_size * (rank + 1)).all()
kccl_torch.communicator("cuda").check()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_dense_tensors_that_are_not_contiguous(world_size, ranks):
    ranks(world_size, """
start()
layout = {"memory_format": torch.channels_last}
everyone = [torch.randint(0, 9, (4, 3, 5, 6), device="cuda").float() for _ in range(world_size)]
for x in everyone:
    dist.broadcast(x, 0)
mine = everyone[rank].clone(**layout)
x = mine.clone()
assert not x.is_contiguous()
dist.all_reduce(x)
assert torch.equal(x, sum(everyone)) and x.stride() == mine.stride()
dist.broadcast(x, 1) if rank == 0 else dist.broadcast(x.copy_(mine), 1)
assert torch.equal(x, everyone[1])
for whole in (torch.zeros(4 * world_size, 3, 5, 6, device="cuda"), torch.cat(everyone)):
    out = whole.clone(**layout)
    dist.all_gather_into_tensor(out, mine)
    assert torch.equal(out, torch.cat(everyone))
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.cat(everyone))
kccl_torch.communicator("cuda").check()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_follow_each_other_across_streams(world_size, ranks):
    ranks(world_size, """
start()
side, main = torch.cuda.Stream(), torch.cuda.current_stream()
dist.all_reduce(filled(4))
for turn in range(50):
    side.wait_stream(main)
    with torch.cuda.stream(side):
        # A millisecond, on one rank: alone, its calls would pass each other.
        torch.cuda._sleep(2_000_000 if turn // 2 % world_size == rank else 1)
        x = filled(20_000) + turn
        work = dist.all_reduce(x, async_op=True)
    if turn % 2:
        work.wait()
        z = x + 1
    y = filled(3000)
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    if turn % 2 == 0:
        work.wait()
        z = x + 1
    assert (z == total + world_size * turn + 1).all() and (y == world_size).all(), turn
torch.cuda.synchronize()
assert work.is_completed() and work.is_success() and work.exception() is None

with torch.cuda.stream(side):
    torch.cuda._sleep(2_000_000)
    x = filled(100)
    future = dist.all_reduce(x, async_op=True).get_future()
(y,) = future.wait()
assert (y == total).all()
work = dist.barrier(async_op=True)
assert work.wait() and work.is_completed()
kccl_torch.communicator("cuda").check()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_asynchronous_calls_run_beside_the_program(world_size, ranks):
    """And what they read is not reused meanwhile, though nothing of the program refers to it."""
    ranks(world_size, """
start()
dist.all_reduce(filled(4))
torch.cuda.synchronize()
works = [dist.all_reduce(filled(1000), async_op=True) for _ in range(3)]
torch.cuda._sleep(2_000_000_000)
slept = torch.cuda.current_stream().record_event()
while not works[-1].is_completed():
    assert not slept.query(), "the calls have waited for what was enqueued behind them"
assert not slept.query()
torch.cuda.synchronize()

for turn in range(50):
    outs = [torch.zeros(world_size * 100_000, device="cuda") for _ in range(3)]
    futures = []
    for out in outs:
        # The peer is late, so the call is under way when its input's memory is free again.
        torch.cuda._sleep(500_000 if turn % world_size == rank else 1)
        work = dist.all_gather_into_tensor(out, filled(100_000), async_op=True)
        futures.append(work.get_future())
        del work
        torch.full((100_000,), -1.0, device="cuda")
    for out, future in zip(outs, futures, strict=True):
        future.wait()
        for each in range(world_size):
            assert (out[100_000 * each : 100_000 * (each + 1)] == each + 1).all(), turn
kccl_torch.communicator("cuda").check()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_groups_share_a_stream_and_captures_run_at_once(world_size, ranks):
    ranks(world_size, """
start()
groups = [dist.group.WORLD, dist.new_group()]
for group in groups:
    dist.all_reduce(filled(4), group=group)
torch.cuda.synchronize()
for turn in range(50):
    begun = []
    for each in range(4):
        torch.cuda._sleep(300_000 if (turn + each) % world_size == rank else 1)
        x = filled(50_000) + turn
        begun.append((x, dist.all_reduce(x, group=groups[each % 2], async_op=True)))
    y = filled(3000)
    dist.all_reduce(y, group=groups[turn % 2])
    for x, work in reversed(begun):
        work.wait()
        assert (x == total + world_size * turn).all(), turn
    assert (y == total).all(), turn

xs = [filled(1000), filled(70_000)]
streams = [torch.cuda.Stream() for _ in groups]
graphs = [torch.cuda.CUDAGraph() for _ in groups]
torch.cuda.synchronize()
with torch.cuda.stream(streams[0]):
    graphs[0].capture_begin(capture_error_mode="relaxed")
    work = dist.all_reduce(xs[0], group=groups[0], async_op=True)
    with torch.cuda.stream(streams[1]):
        graphs[1].capture_begin(capture_error_mode="relaxed")
        dist.all_reduce(xs[1], group=groups[1], async_op=True).wait()
        xs[1] += 1
        graphs[1].capture_end()
    work.wait()
    xs[0] += 1
    graphs[0].capture_end()
for turn in range(4):
    for x in xs:
        x.fill_(rank + 1 + turn)
    for graph in graphs[:: 1 if turn % 2 else -1]:
        graph.replay()
    for x in xs:
        assert (x == total + world_size * turn + 1).all(), turn
for group in groups:
    group.communicator(torch.device("cuda", rank)).check()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_cuda_graph_replays_with_other_data(world_size, ranks):
    facts = ranks(world_size, """
start()
early = None
x, y = filled(4000), filled(300)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x += 1
    try:
        dist.all_reduce(x)
    except kccl.Error as error:
        early = str(error)

dist.all_reduce(x)
kccl_torch.register(kccl_torch.communicator("cuda"))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(x)
    work = dist.broadcast(y, src=world_size - 1, async_op=True)
    z = kccl_torch.all_reduce(x * 2, op="max")
    work.wait()
    dist.barrier()
    kccl_torch.all_reduce_(y)
for turn in range(2):
    for _ in range(2):
        x.fill_(rank + turn)
        y.fill_(rank + turn)
        graph.replay()
        want = total - world_size + turn * world_size
        assert (x == want).all() and (z == 2 * want).all(), (turn, x, z)
        assert (y == world_size * (world_size - 1 + turn)).all()
    eager = filled(10)
    dist.all_reduce(eager)
    assert (eager == total).all()
kccl_torch.communicator("cuda").check()
say(rank=rank, early=early)
""")  # fmt: skip
    for fact in facts.values():
        assert "make one call before the capture" in fact["early"]


# All compilers in one job: torch._dynamo's import and first use, which take seconds, are paid once.
@pytest.mark.parametrize("world_size", [2])
def test_compile(world_size, ranks, tmp_path):
    ranks(world_size, """
start()
kccl_torch.register(kccl_torch.communicator("cuda"))

def step(x):
    y = kccl_torch.all_reduce(x * 2) + 1
    return kccl_torch.broadcast(y * (rank + 1), root=1), kccl_torch.all_reduce(y, op="avg")

for name, options in {
    "aot_eager": {"backend": "aot_eager"},
    "cudagraphs": {"backend": "cudagraphs"},
    "inductor": {},
    "inductor in CUDA graphs": {"mode": "reduce-overhead"},
}.items():
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, **options)
    # Warm-up, then capture, then replay.
    for turn in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x = filled(512) + turn
        y, average = compiled(x)
        want = 2 * (total + turn * world_size) + 1
        assert (y == 2 * want).all() and (average == want).all(), (name, turn, y, average)
kccl_torch.communicator("cuda").check()
say(rank=rank)
""",
        # A pool of forked compilers would outlive its use, and here there is one small kernel.
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_distributed_data_parallel(world_size, ranks):
    ranks(world_size, """
start()
model = torch.nn.Linear(300, 200, device="cuda")
# With init_sync it would compare the parameters by all_gather.
parallel = torch.nn.parallel.DistributedDataParallel(
    model, device_ids=[rank], init_sync=False, bucket_cap_mb=0.01
)
for step in range(3):
    model.zero_grad()
    parallel(torch.full((1, 300), float(rank + step), device="cuda")).sum().backward()
    # The mean of the ranks' inputs.
    assert torch.allclose(model.weight.grad, torch.full_like(model.weight, 0.5 + step))
kccl_torch.communicator("cuda").check()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
def test_a_rank_that_does_not_come(world_size, ranks):
    facts = ranks(world_size, """
start()
dist.all_reduce(filled(4))
torch.cuda.synchronize()
kccl_torch.communicator("cuda").timeout = 0.5
error = None
if rank == 0:
    work = dist.all_reduce(filled(4), async_op=True)
    torch.cuda.synchronize()
    error = type(work.exception()).__name__
    assert work.is_completed() and not work.is_success()
    try:
        work.wait()
        raise AssertionError("no error")
    except kccl.Timeout as caught:
        assert "peer 1 did not arrive" in str(caught)
else:
    time.sleep(3)
say(rank=rank, error=error)
""")  # fmt: skip
    assert facts[0]["error"] == "Timeout"
