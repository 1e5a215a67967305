"""Tensors that are dense but not C-contiguous, in the backend "kccl": as NCCL's takes them."""

import pytest
from torch_ranks import starter

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


LAYOUTS = """
def laid_out(x, layout):
    # A copy whose elements lie in memory in another order, or among others.
    if layout == "channels_last":
        return x.clone(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "columns":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.clone()

def random(who, n=2 * world_size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(who)
    return torch.randint(0, 9, (n, 3, 4, 5), generator=generator).to(dtype)

DENSE = ("plain", "channels_last", "transposed")
everyone = [random(who) for who in range(world_size)]
start()
kccl_torch.register(kccl_torch.communicator("cpu"))
"""


def test_calls_on_one_tensor_take_its_memory(ranks):
    """Nothing is copied, and what the call writes is in the tensor that was given."""
    ranks(2, LAYOUTS + """
for layout in DENSE:
    mine = laid_out(everyone[rank], layout)
    strides, address = mine.stride(), mine.data_ptr()
    for call in (dist.all_reduce, kccl_torch.all_reduce_):
        x = laid_out(everyone[rank], layout)
        call(x)
        assert torch.equal(x, sum(everyone)) and x.stride() == strides, (layout, call)
    for root in range(2):
        x = laid_out(everyone[rank], layout)
        dist.broadcast(x, root)
        assert torch.equal(x, everyone[root]), (layout, root)
        x = laid_out(everyone[rank], layout)
        dist.reduce(x, root)
        assert torch.equal(x, sum(everyone) if rank == root else everyone[rank])
    x = laid_out(everyone[rank], layout)
    for _ in range(2):
        if rank == 0:
            dist.send(mine, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(mine, 0)
        assert torch.equal(x, everyone[1 - rank]), layout
    # Of a dtype that is moved as bytes.
    x = laid_out(random(rank, dtype=torch.float8_e4m3fnuz), layout)
    kccl_torch.broadcast_(x, 1)
    assert torch.equal(x.float(), everyone[1])
    assert mine.stride() == strides and mine.data_ptr() == address
say(rank=rank)
""")  # fmt: skip


def test_calls_with_parts_for_each_rank_keep_the_order_of_the_elements(ranks):
    """Whatever the layouts of input and output are; the ranks' layouts are alike."""
    ranks(2, LAYOUTS + """
half = slice(2 * rank, 2 * rank + 2)
whole, other = sum(everyone), torch.cat(everyone)
exchanged = torch.cat([each[half] for each in everyone])
for given in DENSE:
    for taken in DENSE:
        case = given, taken
        x = laid_out(everyone[rank], given)
        out = laid_out(torch.zeros_like(other), taken)
        dist.all_gather_into_tensor(out, x)
        assert torch.equal(out, other), case
        stacked = torch.stack([laid_out(torch.zeros_like(x), taken) for _ in range(2)])
        dist.all_gather_into_tensor(stacked, x)
        assert torch.equal(stacked, torch.stack(everyone)), case
        out = laid_out(torch.zeros(2, 3, 4, 5), taken)
        dist.reduce_scatter_tensor(out, x)
        assert torch.equal(out, whole[half]), case
        out = laid_out(torch.zeros(4, 3, 4, 5), taken)
        dist.all_to_all_single(out, x)
        assert torch.equal(out, exchanged), case
        # Rank 0 gets and gives one row more of each rank's than rank 1.
        out = laid_out(torch.zeros(6 - 4 * rank, 3, 4, 5), taken)
        dist.all_to_all_single(out, x, [3 - 2 * rank] * 2, [3, 1])
        rows = slice(0, 3) if rank == 0 else slice(3, 4)
        assert torch.equal(out, torch.cat([each[rows] for each in everyone])), case
# In a vector the elements have the order that they have in x.
out = torch.zeros(other.numel())
dist.all_gather_into_tensor(out, laid_out(everyone[rank], "channels_last"))
assert torch.equal(out, other.reshape(-1))
say(rank=rank)
""")  # fmt: skip


def test_lists_take_tensors_of_any_strides(ranks):
    """They are copied anyway, so that even the ranks' strides may differ."""
    ranks(2, LAYOUTS + """
ANY = (*DENSE, "columns")
parts = [each[:2] for each in everyone]
for number, given in enumerate(ANY):
    for taken in ANY:
        # Rank 1 has another layout than rank 0.
        mine = ANY[(number + rank) % len(ANY)]
        x, case = laid_out(everyone[rank], mine), (given, taken)
        outs = [laid_out(torch.zeros_like(x), taken) for _ in range(2)]
        dist.all_gather(outs, x)
        assert all(map(torch.equal, outs, everyone)), case
        outs = [laid_out(torch.zeros_like(x), taken) for _ in range(2)]
        dist.gather(x, outs if rank == 1 else None, dst=1)
        assert rank == 0 or all(map(torch.equal, outs, everyone)), case
        out = laid_out(torch.zeros(2, 3, 4, 5), taken)
        its = [laid_out(part, mine) for part in parts]
        dist.scatter(out, its if rank == 0 else None, src=0)
        assert torch.equal(out, parts[rank]), case
        dist.reduce_scatter(out, its)
        assert torch.equal(out, 2 * parts[rank]), case
        outs = [laid_out(torch.zeros(2, 3, 4, 5), taken) for _ in range(2)]
        dist.all_to_all(outs, its)
        assert all(torch.equal(each, parts[rank]) for each in outs), case
say(rank=rank)
""")  # fmt: skip


def test_data_parallel_training_in_channels_last(ranks):
    """Also with a loop of one's own over the gradients, which have the weights' strides."""
    ranks(2, """
start()
def model_of():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    return model.to(memory_format=torch.channels_last)

def batch(who):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(who))
    return x.to(memory_format=torch.channels_last)

alone, own = model_of(), model_of()
sum(alone(batch(who)).square().mean() / 2 for who in range(2)).backward()
parallel = torch.nn.parallel.DistributedDataParallel(model_of())
parallel(batch(rank)).square().mean().backward()
for x in own.parameters():
    dist.broadcast(x.detach(), 0)
own(batch(rank)).square().mean().backward()
for x in own.parameters():
    dist.all_reduce(x.grad, op=dist.ReduceOp.AVG)
assert not own[0].weight.grad.is_contiguous()
for x, y, z in zip(alone.parameters(), parallel.parameters(), own.parameters(), strict=True):
    assert torch.allclose(x.grad, y.grad, atol=1e-5)
    assert torch.allclose(x.grad, z.grad, atol=1e-5)
say(rank=rank)
""")  # fmt: skip


def test_a_conjugating_view_that_is_not_contiguous_is_refused():
    from kccl.interop.torch_tensors import memory

    x = torch.zeros(4, 3, dtype=torch.complex64).t().conj()
    with pytest.raises(kccl.InvalidArgument, match="x is a view that conjugates"):
        memory(x, "x")
