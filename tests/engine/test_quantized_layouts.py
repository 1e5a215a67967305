"""What tools write into folders besides the weights, and how matrices are unpacked and kept."""

import json
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from quantized_folders import MODEL, fp8, tensors_of, write_folder

import kccl
from kccl.engine.files import quantized_layouts
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.hf import FolderSource
from kccl.engine.formats.table import ON_HOST

UP = "model.layers.0.mlp.up_proj"


def up_of(checkpoint):
    """The matrix UP, without lanes."""
    return checkpoint.as_stored(ON_HOST).tensor("layers.0.w3").reshape(-1, MODEL["hidden_size"])


def test_blocks_of_fp8_need_no_field(tmp_path):
    tensors, meant = tensors_of("fp8 blocks")
    folder = write_folder(tmp_path / "m", "fp8 blocks", tensors, weight_block_size=None)
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(up_of(checkpoint), meant[UP])


def test_the_head_of_fp8_is_as_the_file_has_it(tmp_path):
    """A list of layers that are left alone does not name it."""
    tensors, _ = tensors_of("fp8 tensor")
    kept = {"modules_to_not_convert": []}
    with open_checkpoint(write_folder(tmp_path / "m", "fp8 tensor", tensors, **kept)) as plain:
        assert plain.as_stored(ON_HOST).formats["head"].name == "bfloat16"
    codes, weights = fp8(np.random.default_rng(3), tensors["lm_head.weight"].shape)
    tensors |= {f"lm_head.{part}": each for part, each in codes.items()}
    with open_checkpoint(write_folder(tmp_path / "m", "fp8 tensor", tensors, **kept)) as checkpoint:
        read = checkpoint.as_stored(ON_HOST)
        assert read.formats["head"].name == "e4m3_128"
        np.testing.assert_array_equal(read.tensor("head"), weights)


def test_older_folders_of_modelopt_have_a_file_of_its_own(tmp_path):
    """Patterns name what it leaves alone."""
    kept = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    tensors, meant = tensors_of("nvfp4 modelopt", without=kept)
    folder = write_folder(tmp_path / "m", "nvfp4 modelopt", tensors)
    told = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    told |= {"exclude_modules": ["lm_head", "*.mlp.down*"]}
    (folder / "config.json").write_text(json.dumps(MODEL))
    own = folder / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(up_of(checkpoint), meant[UP])
        formats = checkpoint.as_stored(ON_HOST).formats
        assert formats["gate_up"].name == "nvfp4_128" and formats["down"].name == "bfloat16"
    own.write_text(json.dumps({"quantization": told | {"kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(kccl.Error, match=r"hf_quant_config.json: .*kv_cache_quant_algo is 'FP8'"):
        open_checkpoint(folder)


def test_a_bias_of_zeros_is_ignored_if_the_model_has_none(tmp_path):
    """AutoGPTQ writes one for every layer."""
    tensors, meant = tensors_of("gptq 64")
    for layer, weights in meant.items():
        tensors[f"{layer}.bias"] = np.zeros(len(weights), np.float16)
    folder = write_folder(tmp_path / "m", "gptq 64", tensors)
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(up_of(checkpoint), meant[UP])
    # The query's bias is part of a model with biases.
    config = MODEL | {"attention_bias": True}
    for layer in range(2):
        for part in "qkvo":
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = np.ones_like(tensors[name])
    with open_checkpoint(write_folder(tmp_path / "n", "gptq 64", tensors, config)) as checkpoint:
        assert checkpoint.tensor("layers.0.bq").all()


@pytest.mark.parametrize("name", ["awq 32", "gptq 64", "gptq v2"])
def test_some_rows_are_unpacked_at_a_time(tmp_path, monkeypatch, name):
    monkeypatch.setattr(quantized_layouts, "_ROWS_AT_ONCE", 40)
    tensors, meant = tensors_of(name, MODEL | {"num_hidden_layers": 1})
    folder = write_folder(tmp_path / "m", name, tensors, MODEL | {"num_hidden_layers": 1})
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(up_of(checkpoint), meant[UP])


def test_a_matrix_is_unpacked_in_little_memory(tmp_path):
    """One integer takes half a byte in the file, and 5/8 and more as it is read."""
    config = MODEL | {"num_hidden_layers": 1, "intermediate_size": 8192}
    tensors, _ = tensors_of("gptq 64", config)
    folder = write_folder(tmp_path / "m", "gptq 64", tensors, config)
    with open_checkpoint(folder) as checkpoint:
        read = checkpoint.as_stored(ON_HOST)
        read.read("layers.0.w3", range(1))
        tracemalloc.start()
        read.read("layers.0.w1", range(1))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 3 * 8192 * 128


def test_closing_frees_the_last_matrix(tmp_path):
    """Also that of a thread that still runs."""
    tensors, _ = tensors_of("awq 32")
    folder = write_folder(tmp_path / "m", "awq 32", tensors)
    read, closed = threading.Event(), threading.Event()
    kept = []

    def reads(tensors):
        kept.append(weakref.ref(tensors.kept("a", lambda: np.zeros(8))))
        read.set()
        closed.wait()

    source = FolderSource(folder)
    thread = threading.Thread(target=reads, args=(source._tensors,))
    thread.start()
    read.wait()
    is_kept = kept[0]() is not None
    source.close()
    is_freed = kept[0]() is None
    closed.set()
    thread.join()
    assert is_kept and is_freed


def test_metadata_may_have_any_keys(tmp_path):
    tensors, meant = tensors_of("fp8 tensor")
    folder = write_folder(tmp_path / "m", "fp8 tensor", tensors)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = {"__metadata__": {"dtype": "F16", "format": "pt"}} | json.loads(whole[8:end])
    told = json.dumps(header).encode()
    file.write_bytes(len(told).to_bytes(8, "little") + told + whole[end:])
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(up_of(checkpoint), meant[UP])
