"""Programs of ranks that have a communicator on GPUs and PyTorch."""

from preloaded import run

PRELUDE = """
import torch
comm = kccl.init(backend="cuda")
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
