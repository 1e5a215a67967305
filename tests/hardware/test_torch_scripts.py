"""Scripts of PyTorch with tensors on GPUs, on two ranks; several scripts a launch."""

import pytest
from torch_ranks import starter
from torch_scripts import DATA_PARALLEL, SHARDED

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cuda")


@pytest.mark.parametrize("world_size", [2])
def test_data_parallel_scripts(world_size, ranks):
    """DDP with what scripts set, SyncBatchNorm, Join, ZeRO, and hooks."""
    ranks(world_size, DATA_PARALLEL)


@pytest.mark.parametrize("world_size", [2])
def test_sharded_scripts(world_size, ranks):
    """FSDP2, HSDP, tensor parallelism, a pipeline, and checkpoints of what they shard."""
    ranks(world_size, SHARDED)
