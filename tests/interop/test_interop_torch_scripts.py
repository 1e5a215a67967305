"""Scripts of PyTorch with tensors on the host, on two ranks; several scripts a launch."""

import pytest
from torch_ranks import starter
from torch_scripts import DATA_PARALLEL, SHARDED

pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


def test_data_parallel_scripts(ranks):
    """DDP with what scripts set, SyncBatchNorm's refusal, Join, ZeRO, and hooks."""
    ranks(2, DATA_PARALLEL)


def test_sharded_scripts(ranks):
    """FSDP2, HSDP, tensor parallelism, a pipeline, and checkpoints of what they shard."""
    ranks(2, SHARDED)
