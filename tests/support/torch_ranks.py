"""Runs programs that use PyTorch as ranks, for the tests of kccl.interop.torch."""

import preloaded

PRELUDE = """
import warnings
from datetime import timedelta
import torch
import torch.distributed as dist
import kccl.interop.torch as kccl_torch

warnings.simplefilter("ignore", FutureWarning)
# PyTorch reads these variables when it is imported, and here that was before the fork.
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
dist.set_debug_level_from_env()
rank, world_size = int(os.environ["KCCL_RANK"]), int(os.environ["KCCL_WORLD_SIZE"])
total = world_size * (world_size + 1) // 2
device = os.environ["DEVICE"]
if device == "cuda":
    torch.cuda.set_device(rank)
store = dist.FileStore(os.environ["MEETING"], world_size)

def start(**options):
    options = dict(timeout=timedelta(seconds=20)) | options
    dist.init_process_group("kccl", store=store, rank=rank, world_size=world_size, **options)

def filled(*shape, dtype=torch.float32):
    return torch.full(shape, rank + 1, dtype=dtype, device=device)

def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")
"""


def starter(folder, device, run=preloaded.run):
    """ranks(world_size, program): every rank runs the program; returns what each said, by rank.

    Args:
        folder: For the file of the ranks' FileStore.
        device: "cpu" or "cuda", where `filled` makes its tensors.
        run: Starts them, as preloaded.run does, or ranks.run, which imports PyTorch in each.
    """

    def start(world_size, program, **variables):
        variables |= {"MEETING": str(folder / "store"), "DEVICE": device, "OMP_NUM_THREADS": "1"}
        code, facts, err = run(world_size, PRELUDE + program, timeout=110, **variables)
        assert code == 0, err
        assert len(facts) == world_size, err
        return facts

    return start
