"""Every redistribution of DTensor, and the functional collectives with gradients, on KCCL."""

import pytest
from torch_ranks import starter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


def test_every_redistribution(ranks):
    """In one and two dimensions of the mesh; sizes that the ranks do not divide, too."""
    ranks(3, """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

start()
mesh = init_device_mesh("cpu", (world_size,))
for shape in ((2 * world_size, 3 * world_size), (5, 7)):
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = whole.to(dtype)
        placements = [Replicate(), Shard(0), Shard(1)]
        given = [distribute_tensor(x, mesh, [each]) for each in placements]
        # Its parts add up to x.
        part = x if rank == 0 else torch.zeros_like(x)
        given.append(DTensor.from_local(part, mesh, [Partial()], run_check=False))
        for before in given:
            for after in placements:
                found = before.redistribute(mesh, [after])
                assert torch.equal(found.full_tensor(), x), (before.placements, after, dtype)
mean = whole + total / world_size - 1
for op, want in (("max", whole + world_size - 1), ("min", whole), ("avg", mean)):
    found = DTensor.from_local(whole + rank, mesh, [Partial(op)], run_check=False)
    for after in (Replicate(), Shard(0), Shard(1)):
        assert torch.allclose(found.redistribute(mesh, [after]).full_tensor(), want), (op, after)
x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).requires_grad_()
x.redistribute(mesh, [Replicate()]).to_local().sum().backward()
assert (x.grad.to_local() == 1).all()

# A mesh of two dimensions: each dimension has groups of its own.
mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data", "model"))
assert mesh["data"].get_group().size() == world_size
for before in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0))):
    for after in ((Replicate(), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(1))):
        found = distribute_tensor(whole, mesh, before).redistribute(mesh, after)
        assert torch.equal(found.full_tensor(), whole), (before, after)

import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients

world = dist.group.WORLD
x = torch.full((2 * world_size,), rank + 1.0, requires_grad=True)
for call in (
    lambda: functional.all_reduce(x, "sum", world),
    lambda: functional.all_gather_tensor_autograd(x, 0, world),
    lambda: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world),
    lambda: functional.all_to_all_single_autograd(x, [2] * world_size, [2] * world_size, world),
    lambda: with_gradients.all_reduce(x),
    lambda: torch.cat(with_gradients.all_gather(x)),
    lambda: with_gradients.reduce_scatter(torch.zeros(2), list(x.chunk(world_size))),
):
    y = call()
    y = y.wait() if hasattr(y, "wait") else y
    assert y.sum() > 0
    if y.requires_grad:
        x.grad = None
        # Its gradient is contiguous, as the older versions of PyTorch demand.
        (2 * y).sum().backward()
        assert x.grad is not None and (x.grad > 0).all()
assert torch.equal(functional.broadcast(x.detach(), 1, world), torch.full_like(x, 2))
say(rank=rank)
""")  # fmt: skip
