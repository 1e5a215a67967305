"""Writes a checkpoint's weights, in its dtype, to files that other engines can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl
from kccl.engine.base.extras import library
from kccl.engine.files import gguf as gguf_names
from kccl.engine.files import hf as hf_names
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.hf_config import ARCHITECTURE_OF
from kccl.engine.files.source import CUT_AXIS, layer_names
from kccl.engine.formats.table import DTYPES
from kccl.engine.model.config import ModelConfig, is_vector
from kccl.engine.model.ops import ATTENTION, MLP, products_of_module
from kccl.engine.model.rope import LinearScaling, Llama3Scaling, Rope

Array = NDArray[Any]


def check_ordinary(config: ModelConfig) -> None:
    """Raises kccl.Error for a model that this module does not write: a Laneformer, which only
    KCCL's engine knows, or one with experts, some kinds of RoPE, or its own attention scale.
    """
    if config.family == "laneformer":
        raise kccl.Error(f"it does not know models of the family {config.family}")
    if config.experts is not None:
        raise kccl.Error("mixtures of experts are not written to files")
    if not config.rope.is_fixed or config.rope.attention_factor != 1:
        raise kccl.Error("RoPE of this kind is not written to files")
    if config.attention_scale != config.head_dim**-0.5:
        raise kccl.Error("an attention_scale of its own is not written to files")


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes Hugging Face's layout, a safetensors file for each layer.

    Raises:
        kccl.Error: See check_ordinary(); or the layout cannot express the RoPE scaling, or which
            layers have windows or biases.
    """
    config = checkpoint.config
    check_ordinary(config)
    (folder / "config.json").write_text(json.dumps(_hf_config(config, checkpoint.dtype)))
    names = layer_names(config, hf_names.WHOLE_NAMES, hf_names.LAYER_NAMES)
    weight_map: dict[str, str] = {}
    safetensors = library("safetensors.numpy")
    for group, members in _groups(checkpoint):
        file = f"model-{group}.safetensors"
        tensors = {}
        for name in members:
            tensor = _whole(checkpoint, name)
            part = name.rpartition(".")[2]
            if part in ("wq", "wk", "bq", "bk") and config.rope.is_interleaved:
                tensor = _apart(tensor, config.head_dim)
            tensors[names[name]] = _as_dtype(tensor, checkpoint.dtype)
            weight_map[names[name]] = file
        safetensors.save_file(tensors, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a GGUF file, with one dummy piece of text for each token.

    Raises:
        kccl.Error: See check_ordinary().
    """
    config = checkpoint.config
    check_ordinary(config)
    if config.window:
        raise kccl.Error("a GGUF file of this architecture cannot have a sliding window")
    gguf = library("gguf")
    names = layer_names(config, gguf_names.WHOLE_NAMES, gguf_names.LAYER_NAMES)
    # The file has norms and biases in FP32, and matrices in the checkpoint's dtype.
    kinds = gguf.GGMLQuantizationType
    kind = {"bfloat16": kinds.BF16, "float16": kinds.F16}[checkpoint.dtype]
    writer = gguf.GGUFWriter(path, _architecture(config))
    _add_fields(writer, gguf, config)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    factors = _rope_factors(config)
    if factors is not None:
        _add_tensor(writer, "rope_freqs.weight", factors.shape, kinds.F32)
    shapes = {name: _joint_shape(config, name) for name in names}
    for name, in_file in names.items():
        _add_tensor(writer, in_file, shapes[name], kinds.F32 if is_vector(name) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name in names:
        tensor = _whole(checkpoint, name)
        part = name.rpartition(".")[2]
        # In models of the architecture llama, llama.cpp applies RoPE to the pairs (2i, 2i+1).
        is_turned = part in ("wq", "wk", "bq", "bk") and _architecture(config) == "llama"
        if is_turned and not config.rope.is_interleaved:
            tensor = _together(tensor, config.head_dim)
        # _whole() returns norms and biases in FP32, and all other tensors in the checkpoint's
        # dtype. So the bytes have the type that _add_tensor() has announced.
        writer.write_tensor_data(np.ascontiguousarray(tensor))
    writer.close()


def _groups(checkpoint: Checkpoint) -> Iterator[tuple[str, list[str]]]:
    """Yields (group, names of tensors) for tensors that are written to one file, as of a layer."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint.names():
        parts = name.split(".")
        groups.setdefault(parts[1] if len(parts) > 1 else name, []).append(name)
    yield from groups.items()


def _whole(checkpoint: Checkpoint, name: str) -> Array:
    """Returns a tensor as files have it: the checkpoint's lanes, which are shares of the heads and
    of the MLP's columns, are joined to one matrix.
    """
    tensor = checkpoint.tensor(name)
    if CUT_AXIS.get(name.rpartition(".")[2]) == 1:
        tensor = tensor.transpose(1, 0, 2)
    return tensor.reshape(_joint_shape(checkpoint.config, name))


def _joint_shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    shape, part = config.shapes()[name], name.rpartition(".")[2]
    if part not in CUT_AXIS:
        return shape
    lanes, *joint = shape
    joint[CUT_AXIS[part]] *= lanes
    return tuple(joint)


def _as_dtype(tensor: Array, dtype: str) -> Array:
    return np.ascontiguousarray(tensor.astype(DTYPES[dtype].dtype, copy=False))


def _apart(rows: Array, head_dim: int) -> Array:
    """Returns each head's rows with pairs (2i, 2i+1) moved to (i, i + head_dim/2)."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _together(rows: Array, head_dim: int) -> Array:
    """Returns the inverse of _apart()."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE_OF[config.family]],
        **_hf_layers(config),
        "model_type": config.family,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        "hidden_act": "silu",
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": config.rope.theta, **_hf_scaling(config.rope)},
    }


def _hf_layers(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields for biases and windows that the family's config has."""
    found: dict[str, Any] = {"sliding_window": config.window or None}
    switches = {"attention_bias": products_of_module(ATTENTION)}
    switches["mlp_bias"] = products_of_module(MLP)
    known = {"qwen3": ("attention_bias",), "llama": tuple(switches)}.get(config.family, ())
    found |= {name: set(switches[name]) <= set(config.biases) for name in known}
    expressed = [kind for name in known if found[name] for kind in switches[name]]
    expressed += ["qkv"] * (config.family == "qwen2")
    if expressed != list(config.biases):
        told = (
            f"biases of {', '.join(config.biases)} alone"
            if config.biases
            else ("model without biases")
        )
        raise kccl.Error(f"its layout has no {told} in the family {config.family}")
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    if config.family in ("qwen2", "qwen3"):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        return found | {"use_sliding_window": config.window != 0, "layer_types": kinds}
    if any(windows) and (config.family == "llama" or not all(windows)):
        raise kccl.Error(f"its layout has no windows in these layers of the family {config.family}")
    return found


def _architecture(config: ModelConfig) -> str:
    """Returns GGUF's name of the model's architecture."""
    return "llama" if config.family == "mistral" else config.family


def _hf_scaling(rope: Rope) -> dict[str, Any]:
    match rope.scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
        case _:
            raise kccl.Error("its layout has no table of RoPE factors")


def _rope_factors(config: ModelConfig) -> Array | None:
    """Returns the factor by which each pair's frequency is divided; None without scaling."""
    rope = config.rope
    if rope.scaling is None:
        return None
    plain = Rope(theta=rope.theta).frequencies(config.head_dim)
    return (plain / rope.frequencies(config.head_dim)).astype(np.float32)


def _add_fields(writer: Any, gguf: Any, config: ModelConfig) -> None:
    add: dict[Callable[[Any], None], Any] = {
        writer.add_block_count: config.num_layers,
        writer.add_context_length: config.context,
        writer.add_embedding_length: config.hidden,
        writer.add_feed_forward_length: config.ffn,
        writer.add_head_count: config.num_heads,
        writer.add_head_count_kv: config.num_kv_heads,
        writer.add_key_length: config.head_dim,
        writer.add_value_length: config.head_dim,
        writer.add_rope_dimension_count: config.head_dim,
        writer.add_rope_freq_base: config.rope.theta,
        writer.add_layer_norm_rms_eps: config.norm_eps,
        writer.add_vocab_size: config.vocab_size,
        writer.add_tokenizer_model: "llama",
        writer.add_token_list: [f"<{token}>" for token in range(config.vocab_size)],
        writer.add_token_scores: [0.0] * config.vocab_size,
        writer.add_token_types: [int(gguf.TokenType.NORMAL)] * config.vocab_size,
        writer.add_bos_token_id: 0,
        writer.add_eos_token_id: 0,
    }
    for method, value in add.items():
        method(value)


def _add_tensor(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    dtype = np.float32 if kind.name == "F32" else np.uint16
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    writer.add_tensor_info(name, shape, np.dtype(dtype), nbytes, raw_dtype=kind)
