"""Laneformer's logits against the PyTorch module beside this file."""

import json

import numpy as np
import pytest
import torch
from laneformer_torch import Laneformer
from safetensors.torch import save_file

from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.long

CONFIG = {
    "architectures": ["LaneformerForCausalLM"],
    "model_type": "laneformer",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 12,
    "vocab_size": 208,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "use_early_comm": False,
    "use_early_messages": True,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "lm_head_type": "replicate",
    "message_dtype": "float32",
    "sliding_window": 16,
    "swa_layers": 5,
}
IDS = np.random.default_rng(3).integers(CONFIG["vocab_size"], size=60).tolist()


def write(folder, config, seed=0):
    """Writes a checkpoint with random weights; returns the module that has them, in FP32."""
    generator = torch.Generator().manual_seed(seed)
    module = Laneformer(config)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = parameter.shape[-1] ** -0.5
            value = 1 + 0.3 * noise if parameter.ndim == 1 else spread * noise
            parameter.copy_(value.to(torch.bfloat16))
    weights = {name: value.to(torch.bfloat16) for name, value in module.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return module


def logits_of(folder, config):
    """The reference's logits and the module's."""
    module = write(folder, config)
    with torch.no_grad():
        wanted = module(torch.tensor([IDS]))[0].numpy()
    with open_checkpoint(folder) as checkpoint:
        return Reference(checkpoint).logits(IDS), wanted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"broadcast_delay": 1},
        {"broadcast_delay": 3},
        {"broadcast_delay": 0},
        {"use_early_comm": True},
        {"use_early_messages": False},
        {"use_early_comm": True, "use_early_messages": False},
        {"use_attention_comm": False},
        {"use_mlp_comm": False},
        {"use_attention_comm": False, "use_mlp_comm": False},
        {"lm_head_type": "vocab_parallel"},
        {"swa_layers": 7, "sliding_window": 3},
        {"num_lanes": 8, "rope_theta": 500.0, "rms_norm_eps": 0.1},
        {"num_lanes": 1},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()) or "default",
)
def test_logits(tmp_path, changes, assert_close):
    assert_close(*logits_of(tmp_path, CONFIG | changes), 2e-5)


def test_logits_with_messages_in_16_bits(tmp_path, assert_close):
    """Messages round alike except where the FP32 sum is about midway between two BF16 numbers."""
    assert_close(*logits_of(tmp_path, CONFIG | {"message_dtype": "bfloat16"}), 1e-2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broadcast_delay", 1),
        ("use_early_comm", True),
        ("use_early_messages", False),
        ("use_attention_comm", False),
        ("use_mlp_comm", False),
        ("sliding_window", 15),
        ("swa_layers", 6),
        ("rope_theta", 9_000.0),
        ("message_dtype", "bfloat16"),
        ("rms_norm_eps", 1e-3),
    ],
)
def test_each_switch_changes_the_logits(tmp_path, name, value):
    """Without this, the agreement above would say nothing about each."""
    module = write(tmp_path, CONFIG)
    changed = Laneformer(CONFIG | {name: value})
    changed.load_state_dict(module.state_dict())
    with torch.no_grad():
        difference = changed(torch.tensor([IDS])) - module(torch.tensor([IDS]))
    assert difference.abs().max() > 1e-4
