"""The folder of random weights in a shape of gpt-oss."""

from dataclasses import replace

import numpy as np
import pytest

import kccl
from kccl.bench import random_folder
from kccl.engine.executors.opening import read_for
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.random_weights import shape_of
from kccl.engine.model.config import Experts

SHAPE = {"hidden": 64, "ffn": 96, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
SHAPE |= {"vocab_size": 128, "experts": Experts(num=4, chosen=2)}


def test_the_folder_has_the_shapes_model(tmp_path, monkeypatch):
    monkeypatch.setattr(random_folder, "_POOL", 1 << 20)
    config = replace(shape_of("gpt-oss-20b:2"), **SHAPE)
    total = random_folder.write(tmp_path / "model", config)
    tensors = [*random_folder.tensors_of(config)]
    assert total == sum(each.nbytes for each in tensors)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        # The reader chooses the lanes, and writes out the scale that 0 stands for.
        free = {"num_lanes": checkpoint.config.num_lanes, "attention_scale": 16**-0.5}
        assert checkpoint.config == replace(config, **free) and len(checkpoint.files) == 3
        formats = read_for(checkpoint, "sim", None, None).formats
        assert {each.name for each in formats.values()} == {"bfloat16", "mxfp4"}
        assert formats["expert_gate_up"].name == formats["expert_down"].name == "mxfp4"
        assert (checkpoint.tensor("norm").astype(np.float32) == 1).all()
        head = checkpoint.tensor("head").astype(np.float32)
        assert head.shape == (128, 64) and 0.1 < head.std() < 0.15


def test_other_families_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["random_folder", "llama-1b", str(tmp_path / "model")])
    with pytest.raises(kccl.InvalidArgument, match="shape is 'llama-1b', must be one of gpt-oss"):
        random_folder.main()
