"""What training and inference scripts of PyTorch call, as programs for two ranks of torch_ranks."""

_MODEL = """
import copy
from torch.nn import functional as F

def model_of(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers).to(device)

def batch(step, who):
    generator = torch.Generator().manual_seed(100 * step + who)
    return torch.randn(6, 8, generator=generator).to(device)

def trained(steps=3, lr=0.1):
    # One process that sees both ranks' batches.
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(model(batch(step, who)).square().mean() for who in range(2)) / 2).backward()
        optimizer.step()
    return model

def check(state):
    for name, x in trained().state_dict().items():
        assert torch.allclose(state[name], x, atol=1e-5), name
"""

DATA_PARALLEL = (
    _MODEL
    + """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

start()
for options in ({}, {"gradient_as_bucket_view": True, "static_graph": True}):
    model = DDP(model_of(seed=rank), **options)
    # Rank 0's parameters are everybody's.
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    check(model.module.state_dict())

# Accumulated gradients: only the last backward of a step sends.
model, alone = DDP(model_of()), model_of()
with model.no_sync():
    model(batch(0, rank)).sum().backward()
model(batch(1, rank)).sum().backward()
sum(alone(batch(step, who)).sum() / 2 for step in range(2) for who in range(2)).backward()
for x, y in zip(model.parameters(), alone.parameters(), strict=True):
    assert torch.allclose(x.grad, y.grad, atol=1e-4)

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
        for number, dtype in enumerate((torch.bool, torch.uint8, torch.int64)):
            self.register_buffer(f"b{number}", torch.full((3,), rank, dtype=dtype))

    def forward(self, x):
        return self.left(x) if rank == 0 else self.right(x)

model = DDP(Branches().to(device), find_unused_parameters=True)
for step in range(2):
    model(batch(step, rank)).sum().backward()
    assert all(x.grad is not None for x in model.parameters())
assert all((x == 0).all() for x in model.buffers())

model = DDP(model_of())
# PyTorch without CUDA refuses bfloat16 here.
kind = "bf16" if torch.version.cuda else "fp16"
model.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))
model(batch(0, rank)).sum().backward()
# This hook waits for a call within the callback of another one.
model = DDP(torch.nn.Linear(64, 64).to(device))
model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
for step in range(4):
    model(torch.ones(2, 64, device=device)).sum().backward()
    assert torch.allclose(model.module.bias.grad, torch.full((64,), 2.0 + 2 * step, device=device))
model = DDP(model_of())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(batch(step, rank)).square().mean().backward()
    optimizer.step()
check(model.module.state_dict())
optimizer.consolidate_state_dict(to=0)
assert rank == 1 or optimizer.state_dict()["param_groups"]

model = DDP(model_of())
with Join([model]):
    # Rank 1 has two batches more than rank 0.
    for step in range(2 + 2 * rank):
        model(batch(step, rank)).sum().backward()

model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(8)).to(device)
if device == "cpu":
    name, text = error_of(lambda: model(batch(0, rank)))
    assert "expected input tensor to be on" in text and name == "ValueError", (name, text)
else:
    alone = torch.nn.BatchNorm1d(8).to(device)
    both = alone(torch.cat([batch(0, who) for who in range(2)]))
    assert torch.allclose(model(batch(0, rank)), both[6 * rank : 6 * rank + 6], atol=1e-5)
dist.destroy_process_group()
say(rank=rank)
"""
)

SHARDED = (
    _MODEL
    + """
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
)

start()
folder = os.environ["MEETING"] + ".checkpoints"

def whole(model):
    return {name: x.full_tensor() for name, x in model.state_dict().items()}

def train(model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()

names = {"mesh_dim_names": ("replicate", "shard")}
for mesh in (init_device_mesh(device, (2,)), init_device_mesh(device, (2, 1), **names),
             init_device_mesh(device, (1, 2), **names)):
    model = model_of()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model)
    check(whole(model))
model = model_of()
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
model.set_gradient_divide_factor(4.0)
model(batch(0, rank)).sum().backward()
assert all(x.grad is not None for x in model.parameters())

# A checkpoint on the backend itself: saved, loaded into a new model, and saved without a wait.
model = model_of()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
train(model, optimizer)
state, of_optimizer = get_state_dict(model, optimizer)
checkpoint.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
other = model_of(seed=5)
fully_shard(other)
its = torch.optim.AdamW(other.parameters(), 0.1)
state, of_optimizer = get_state_dict(other, its)
loaded = {"model": state, "optimizer": of_optimizer}
checkpoint.load(loaded, checkpoint_id=folder)
set_state_dict(other, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
for x, y in zip(whole(model).values(), whole(other).values(), strict=True):
    assert torch.equal(x, y)
checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=folder + "2").result()

# Tensor parallelism, with and without sequence parallelism.
mesh, alone = init_device_mesh(device, (2,)), model_of()
model = parallelize_module(model_of(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
x = batch(0, 0)
found = model(x)
assert torch.allclose(found, alone(x), atol=1e-5)
found.square().mean().backward()
alone(x).square().mean().backward()
for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
    assert torch.allclose(mine.grad.full_tensor(), its.grad, atol=1e-5)
model = torch.nn.Sequential(torch.nn.LayerNorm(8, device=device), *model_of())
alone = copy.deepcopy(model)
model = parallelize_module(model, mesh, {
    "0": SequenceParallel(sequence_dim=0),
    "1": ColwiseParallel(input_layouts=Shard(0)),
    "3": RowwiseParallel(output_layouts=Replicate()),
})
assert torch.allclose(model(distribute_tensor(x, mesh, [Shard(0)]).to_local()), alone(x), atol=1e-5)

# A pipeline of two stages.
for schedule in (ScheduleGPipe, Schedule1F1B):
    model, alone = model_of(), model_of()
    x, wanted = batch(0, 0), torch.zeros(6, 4, device=device)
    mine = torch.nn.Sequential(*(model[:2] if rank == 0 else model[2:]))
    stage = PipelineStage(mine, rank, 2, x.device)
    runs = schedule(stage, 3, loss_fn=lambda y, wanted: (y - wanted).square().mean())
    if rank == 0:
        runs.step(x)
    else:
        losses = []
        found = runs.step(target=wanted, losses=losses)
        assert torch.allclose(found, alone(x), atol=1e-5) and len(losses) == 3
    alone(x).square().mean().backward()
    of_alone = alone[:2] if rank == 0 else alone[2:]
    for mine_, its in zip(mine.parameters(), of_alone.parameters(), strict=True):
        assert torch.allclose(mine_.grad, its.grad, atol=1e-5)
dist.destroy_process_group()
say(rank=rank)
"""
)
