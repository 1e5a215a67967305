"""Folders in Hugging Face's layout: tensors, shards, and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import (
    LANEFORMER,
    LLAMA,
    QWEN3,
    count,
    laneformer_shapes,
    random_tensors,
    shapes_of,
    write_folder,
)

import kccl
from kccl.engine.files.checkpoint import open_checkpoint


@pytest.mark.parametrize("config", [LLAMA, QWEN3, LANEFORMER], ids=lambda each: each["model_type"])
def test_every_tensor_arrives_under_its_name(tmp_path, config):
    tensors = write_folder(tmp_path, config)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.num_parameters() == count(shapes_of(config))
        for name, shape in checkpoint.config.shapes().items():
            read = checkpoint.tensor(name)
            assert read.shape == shape
            assert read.dtype == (np.float32 if name.endswith("norm") else ml_dtypes.bfloat16)
        assert checkpoint.names() == tuple(checkpoint.config.shapes())
        embedding = next(value for name, value in tensors.items() if "embed" in name)
        assert (checkpoint.tensor("embedding") == embedding).all()
        assert (checkpoint.rows("embedding", 3, 7) == embedding[3:7]).all()
        norm = tensors["model.norm.weight"].astype(np.float32)
        assert (checkpoint.tensor("norm") == norm).all()


def test_ordinary_matrices_are_cut_into_lanes(tmp_path):
    tensors = write_folder(tmp_path, LLAMA)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.num_lanes == 2
        parts = {name: checkpoint.tensor(f"layers.1.{name}") for name in ("wq", "wk", "wo", "w2")}
    at = "model.layers.1"
    for lane in range(2):
        heads, ffn = slice(8 * lane, 8 * lane + 8), slice(12 * lane, 12 * lane + 12)
        assert (parts["wq"][lane] == tensors[f"{at}.self_attn.q_proj.weight"][heads]).all()
        keys = tensors[f"{at}.self_attn.k_proj.weight"][4 * lane : 4 * lane + 4]
        assert (parts["wk"][lane] == keys).all()
        assert (parts["wo"][lane] == tensors[f"{at}.self_attn.o_proj.weight"][:, heads]).all()
        assert (parts["w2"][lane] == tensors[f"{at}.mlp.down_proj.weight"][:, ffn]).all()


def test_a_head_cut_by_vocabulary_is_one_matrix(tmp_path):
    tensors = write_folder(tmp_path, LANEFORMER | {"lm_head_type": "vocab_parallel"})
    head = tensors["lm_head.weight"].reshape(304, 16)
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.tensor("head") == head).all()
        for start, stop in ((0, 304), (70, 80), (76, 152), (303, 304), (5, 5)):
            assert (checkpoint.rows("head", start, stop) == head[start:stop]).all()
        for start, stop in ((-1, 3), (3, 2), (300, 305)):
            with pytest.raises(kccl.InvalidArgument, match="head has no rows"):
                checkpoint.rows("head", start, stop)
        with pytest.raises(kccl.InvalidArgument, match=r"layers\.0\.wq has no rows"):
            checkpoint.rows("layers.0.wq", 0, 1)


def split(folder, tensors, shards):
    """Writes tensors into shards and an index."""
    names = sorted(tensors)
    weight_map = {name: f"part-{index % shards}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        held = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(held, folder / file)
    return weight_map


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards(tmp_path):
    tensors = write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    weight_map = split(tmp_path, tensors, 3)
    write_index(tmp_path, weight_map)
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.tensor("head") == tensors["lm_head.weight"]).all()
    (other, *_) = {*weight_map.values()} - {weight_map["lm_head.weight"]}
    for change, told in (
        ({"extra": "part-0.safetensors"}, r"part-0.safetensors: tensor extra is missing$"),
        ({"lm_head.weight": "../other"}, r"tensor lm_head.weight is in \.\./other, must be"),
        ({"lm_head.weight": other}, r"part-\d.safetensors: tensor lm_head.weight is here, but not"),
        ({"zz": "gone.safetensors"}, r"gone.safetensors does not exist$"),
        ({"lm_head.weight": 3}, "is in 3, must be in a file beside it"),
    ):
        write_index(tmp_path, weight_map | change)
        with pytest.raises(kccl.Error, match=told):
            open_checkpoint(tmp_path)


# ---- Tensors that are not right ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lm_head.weight", None, "tensor lm_head.weight is missing$"),
        ("model.layers.1.mlp.up_proj.weight", None, r"layers\.1\.mlp\.up_proj\.weight is missing$"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            np.zeros((16, 8), np.float32),
            r"k_proj\.weight has shape \[16, 8\], must have \[8, 16\] by the model's",
        ),
        (
            "model.layers.0.self_attn.q_proj.bias",
            np.zeros(16, np.float32),
            r"q_proj\.bias is not part of a llama model",
        ),
        ("lm_head.weight", np.zeros((300, 16), np.int8), "has dtype I8, must be one of BF16"),
    ],
)
def test_a_wrong_tensor_is_named_when_the_folder_is_opened(tmp_path, name, value, told):
    tensors = random_tensors(shapes_of(LLAMA)) | {name: value}
    write_folder(tmp_path, LLAMA, {key: each for key, each in tensors.items() if each is not None})
    with pytest.raises(kccl.Error, match=told) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_not_finite_are_refused_when_read(tmp_path, name, value):
    tensors = random_tensors(shapes_of(LLAMA), np.float32)
    tensors[name].reshape(-1)[-1] = value
    write_folder(tmp_path, LLAMA, tensors)
    ours = "norm" if name == "model.norm.weight" else "layers.1.w2"
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.tensor("head")
        # The largest of FP32 are infinite in BF16; norms stay FP32.
        if (ours, value) == ("norm", 3.4e38):
            assert checkpoint.tensor(ours)[-1] == np.float32(value)
            return
        told = "beyond 3.39e.38" if value == 3.4e38 else "that is NaN or infinite"
        with pytest.raises(kccl.Error, match=f"tensor {name} has a weight {told}"):
            checkpoint.tensor(ours)


def test_tensors_that_are_not_needed_are_ignored(tmp_path):
    tensors = random_tensors(shapes_of(QWEN3))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    write_folder(tmp_path, QWEN3, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert "head" not in checkpoint.names()


def test_files_that_are_missing_or_other_files_are_named(tmp_path):
    with pytest.raises(kccl.Error, match="gone does not exist"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(kccl.Error, match=r"cannot read .*config\.json: No such file"):
        open_checkpoint(tmp_path)
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(kccl.Error, match=r"model\.safetensors is no safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(kccl.Error, match=r"has neither model\.safetensors nor model"):
        open_checkpoint(tmp_path)
    for text, told in (("{", "is not JSON"), ("[1]", "holds .*must hold an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(kccl.Error, match=told):
            open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(kccl.Error, match="is not JSON"):
        open_checkpoint(tmp_path)


def test_a_closed_checkpoint_says_so(tmp_path):
    write_folder(tmp_path, LANEFORMER, random_tensors(laneformer_shapes(LANEFORMER)))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(kccl.InvalidArgument, match="no tensor that is called 'wq' here"):
        checkpoint.tensor("wq")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(kccl.Error, match="was closed"):
        checkpoint.tensor("norm")
