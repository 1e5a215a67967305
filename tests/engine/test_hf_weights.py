"""Which weights of a folder count, and what beside them would change the logits."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import LLAMA, QWEN3, random_tensors, shapes_of, write_folder

import kccl
from kccl.engine.files.checkpoint import open_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = LLAMA | {"tie_word_embeddings": True}


def matrices(folder):
    """The embedding, and the head or None where the model is tied."""
    with open_checkpoint(folder) as checkpoint:
        head = None if checkpoint.config.is_tied else checkpoint.tensor("head")
        return checkpoint.tensor("embedding"), head


@pytest.mark.parametrize("config", [TIED, QWEN3], ids=["llama", "qwen3"])
def test_a_head_that_is_not_the_embedding_is_used(tmp_path, config):
    tensors = random_tensors(shapes_of(config | {"tie_word_embeddings": False}))
    # One element of the last row.
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 1
    write_folder(tmp_path, config, tensors)
    embedding, head = matrices(tmp_path)
    assert (embedding == tensors[EMBEDDING]).all() and (head == tensors[HEAD]).all()


def test_a_head_that_is_the_embedding_is_tied(tmp_path):
    tensors = random_tensors(shapes_of(LLAMA))
    write_folder(tmp_path, TIED, tensors | {HEAD: tensors[EMBEDDING].copy()})
    assert matrices(tmp_path)[1] is None
    # Where the file has one of them, it is both.
    write_folder(tmp_path, TIED, {name: each for name, each in tensors.items() if name != HEAD})
    assert (matrices(tmp_path)[0] == tensors[EMBEDDING]).all()
    only = {name: each for name, each in tensors.items() if name != EMBEDDING}
    write_folder(tmp_path, TIED, only)
    embedding, head = matrices(tmp_path)
    assert (embedding == tensors[HEAD]).all() and head is None


def test_a_single_file_counts_and_not_the_index_beside_it(tmp_path):
    tensors = write_folder(tmp_path, LLAMA)
    others = random_tensors(shapes_of(LLAMA), seed=1)
    save_file(others, tmp_path / "part.safetensors")
    weight_map = json.dumps({"weight_map": dict.fromkeys(others, "part.safetensors")})
    (tmp_path / "model.safetensors.index.json").write_text(weight_map)
    assert (matrices(tmp_path)[1] == tensors[HEAD]).all()
    (tmp_path / "model.safetensors").unlink()
    assert (matrices(tmp_path)[1] == others[HEAD]).all()


def test_names_of_the_bare_model(tmp_path):
    tensors = random_tensors(shapes_of(TIED))
    bare = {name.removeprefix("model."): each for name, each in tensors.items()}
    write_folder(tmp_path, TIED, bare)
    assert (matrices(tmp_path)[0] == tensors[EMBEDDING]).all()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_is_refused(tmp_path, name):
    write_folder(tmp_path, LLAMA)
    (tmp_path / name).write_text(json.dumps({"base_model_name_or_path": "people/base"}))
    of = " of people/base" if name.endswith("json") else ""
    told = f"{name}: the folder has an adapter{of}, which changes .* merge_and_unload"
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path)
    # A folder with an adapter alone has no configuration.
    (tmp_path / "config.json").unlink()
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is of a format that is not read: load the folder"),
        ("consolidated.00.pth", "consolidated.00.pth is of a format that is not read"),
        ("consolidated.safetensors", "consolidated.safetensors has Mistral's own names"),
        ("model.fp16.safetensors", "model.fp16.safetensors is a variant: to use it, name it"),
        ("model-00001-of-00002.safetensors", "is a part of a model, whose index is missing"),
        ("weights.safetensors", "weights.safetensors is not a name that transformers reads"),
        ("m.gguf", "it has m.gguf: give that file as the model"),
    ],
)
def test_weights_under_another_name_are_named(tmp_path, name, told):
    tensors = write_folder(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    (tmp_path / name).write_bytes(file.read_bytes())
    # Beside the right file it does not count.
    assert (matrices(tmp_path)[1] == tensors[HEAD]).all()
    file.unlink()
    with pytest.raises(kccl.Error, match=f"has neither model.safetensors nor .*{told}"):
        open_checkpoint(tmp_path)


def test_a_folder_that_has_a_model_below_or_in_a_file(tmp_path):
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(
        kccl.Error, match=f"has snapshots of .*: give one as the model, {tmp_path}/"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(kccl.Error, match=r"has m\.gguf and no config\.json: give that file as the"):
        open_checkpoint(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (POINTER, "a Git LFS pointer, not the file itself; run `git lfs pull` in its folder$"),
        (b"\n<!DOCTYPE html><html>", "an HTML page, not a model's file; download it again$"),
        (b"Entry not found", "a server's error message, not a model's file"),
        (b"", "empty; download it again$"),
        (b"PK\3\4" + bytes(60), "a zip archive, as PyTorch writes"),
    ],
    ids=["pointer", "page", "server", "empty", "zip"],
)
def test_what_lies_in_a_files_place_is_named(tmp_path, file, content, told):
    write_folder(tmp_path, LLAMA, with_tokenizer=True)
    (tmp_path / file).write_bytes(content)
    with (
        pytest.raises(kccl.Error, match=f"{file} is no.*: it is {told}"),
        open_checkpoint(tmp_path) as opened,
    ):
        opened.tokenizer()


@pytest.mark.parametrize(("kept", "told"), [(0.9, "its tensors end at byte"), (0.01, "its header")])
def test_a_truncated_file_says_so(tmp_path, kept, told):
    write_folder(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(kccl.Error, match=f"is no safetensors file: it is truncated; {told}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.2.mlp.up_proj.weight",
    ],
)
def test_tensors_that_the_configuration_does_not_name_are_refused(tmp_path, name):
    tensors = random_tensors(shapes_of(LLAMA)) | {name: np.ones((1,), np.float32)}
    write_folder(tmp_path, LLAMA, tensors)
    with pytest.raises(kccl.Error, match=f"tensor {name} is not part of a llama model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("final_logit_softcapping", 30.0, None),
        ("attn_logit_softcapping", 50.0, 0.0),
        ("logit_scale", 0.25, 1.0),
        ("logits_scaling", 8.0, 1),
        ("residual_multiplier", 0.22, 1.0),
        ("embedding_multiplier", 12.0, 1.0),
        ("attention_multiplier", 0.01, None),
        ("use_qk_norm", True, False),
        ("num_local_experts", 8, 0),
        ("no_rope_layers", [1, 0], []),
        ("text_config", {"hidden_size": 3}, {}),
        ("compression_config", {"format": "x"}, None),
        ("is_causal", False, True),
        ("per_layer_config", {"0": {"rms_norm_eps": 1.0}}, {}),
        ("kv_sharing_modes", ["reuse", "store"], None),
        ("attention_chunk_size", 0, None),
        ("transformers_weights", "other.safetensors", None),
    ],
)
def test_fields_that_would_change_the_logits(tmp_path, field, value, neutral):
    write_folder(tmp_path, LLAMA | {field: neutral})
    open_checkpoint(tmp_path).close()
    write_folder(tmp_path, LLAMA | {field: value})
    with pytest.raises(kccl.Error, match=f"config.json: field {field} is .*, must be absent"):
        open_checkpoint(tmp_path)
