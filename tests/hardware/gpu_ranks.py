"""Programs of ranks that have a communicator on GPUs and PyTorch."""

from gpu_vendor import BACKEND
from preloaded import run

PRELUDE = f"""
import torch
comm = kccl.init(backend="{BACKEND}")
torch.cuda.set_device(comm.rank)
total = comm.world_size * (comm.world_size + 1) / 2
def filled(count=4000, dtype=torch.float32):
    return torch.full((count,), comm.rank + 1, dtype=dtype, device="cuda")
"""


def ranks(world_size, program, **variables):
    code, facts, err = run(world_size, PRELUDE + program, **variables)
    assert code == 0, err
    assert len(facts) == world_size, err
    return facts
