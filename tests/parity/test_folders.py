"""Folders as people have them, against what Hugging Face transformers makes of them."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tiny_models import LLAMA, QWEN3, random_tensors, shapes_of, write_folder
from transformers import AutoModelForCausalLM

from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.long

IDS = np.random.default_rng(2).integers(300, size=40).tolist()
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def theirs(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def scaled(config):
    """Random weights whose logits are of the size of ordinary ones."""
    tensors = random_tensors(shapes_of(config | {"tie_word_embeddings": False}))
    return {name: (each / 2 if each.ndim > 1 else each) for name, each in tensors.items()}


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["other-head", "same-head", "only-head", "bare", "index"])
def test_weights(tmp_path, config, kind, assert_close):
    config = config | {"tie_word_embeddings": kind != "index"}
    tensors = scaled(config)
    if kind == "same-head":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    elif kind == "only-head":
        del tensors[EMBEDDING]
    elif kind == "bare":
        del tensors[HEAD]
        tensors = {name.removeprefix("model."): each for name, each in tensors.items()}
    write_folder(tmp_path, config, tensors)
    if kind == "index":
        others = {name: each + each for name, each in tensors.items()}
        save_file(others, tmp_path / "part.safetensors")
        names = ", ".join(f'"{name}": "part.safetensors"' for name in others)
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert_close(Reference(checkpoint).logits(IDS), theirs(tmp_path), 1e-4)
