"""Runs torch.distributed's collectives with KCCL, and KCCL's collectives under torch.compile.

torchrun --standalone --nproc-per-node 2 examples/06_torch_distributed.py
"""

import torch
import torch.distributed as dist

import kccl.interop.torch as kccl_torch

dist.init_process_group("kccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
has_gpus = torch.cuda.device_count() >= world_size
device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")

x = torch.full((4,), rank + 1.0, device=device)
dist.all_reduce(x)
assert (x == sum(range(1, world_size + 1))).all()

kccl_torch.register(kccl_torch.communicator(device))


@torch.compile(fullgraph=True)
def mean_of_squares(x: torch.Tensor) -> torch.Tensor:
    return kccl_torch.all_reduce(x * x, op="avg")


y = mean_of_squares(torch.full((4,), rank + 1.0, device=device))
assert (y == sum(each**2 for each in range(1, world_size + 1)) / world_size).all()
print(f"rank {rank} of {world_size} on {device}: {x.tolist()}, {y.tolist()}")
dist.destroy_process_group()
