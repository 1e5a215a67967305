"""Folders in Hugging Face's layout: fields, tensors, shards, and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
from kccl.engine.checkpoint import open_checkpoint
from kccl.engine.hf_config import read_config
from kccl.engine.rope import LinearScaling, Llama3Scaling, Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def config_of(tmp_path):
    """config_of(config): what is read from this config.json."""

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_config(tmp_path / "config.json")

    return read


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


# ---- Fields ------------------------------------------------------------------------------------


def test_laneformer_fields(config_of):
    config = config_of(LANEFORMER)
    assert (config.family, config.num_lanes, config.delay) == ("laneformer", 4, 2)
    assert (config.window, config.window_layers) == (8, 2)
    assert config.rope == Rope(theta=10_000.0, is_interleaved=True)
    assert config.message_dtype == "bfloat16" and config.norm_eps == 1e-5
    assert not config.early_comm and config.early_messages
    assert config.attention_comm and config.mlp_comm and config.lm_head == "replicate"


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"model_type": "laneformer_tp"}, "family", "laneformer"),
        ({"architectures": None}, "family", "laneformer"),
        ({"swa_layers": None, "sliding_window_n_layers": 1}, "window_layers", 1),
        ({"sliding_window_n_layers": 2}, "window_layers", 2),
        ({"swa_layers": [0, 1]}, "window_layers", 2),
        ({"sliding_window": None}, "window", 0),
        ({"broadcast_delay": 1}, "delay", 1),
        ({"use_early_comm": True}, "early_comm", True),
        ({"use_early_messages": False}, "early_messages", False),
        ({"use_comm": False}, "mlp_comm", False),
        ({"use_comm": False, "use_attention_comm": True}, "attention_comm", True),
        ({"use_mlp_comm": False}, "mlp_comm", False),
        ({"lm_head_type": "vocab_parallel"}, "lm_head", "vocab_parallel"),
        ({"message_dtype": "float32"}, "message_dtype", "float32"),
        ({"rms_norm_eps": 1e-6}, "norm_eps", 1e-6),
        ({"rope_theta": 5e5}, "rope", Rope(theta=5e5, is_interleaved=True)),
        ({"rope_interleaved": False}, "rope", Rope()),
        ({"pre_norm_lane_agg": False, "replicated_rmsn_scale": True}, "num_lanes", 4),
    ],
)
def test_switches_of_laneformer(config_of, change, field, value):
    assert getattr(config_of(LANEFORMER | change), field) == value


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({}, Rope()),
        ({"rope_theta": 1e5}, Rope(theta=1e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(scaling=LinearScaling(2.0))),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            Rope(theta=5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            Rope(theta=5e5, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(theta=1e6)),
    ],
)
def test_rope_in_either_spelling(config_of, change, rope):
    assert config_of(LLAMA | change).rope == rope


def test_ordinary_families(config_of):
    llama, qwen3 = config_of(LLAMA), config_of(QWEN3)
    assert (llama.num_lanes, llama.head_dim, llama.delay, llama.is_tied) == (2, 4, 0, False)
    assert (qwen3.head_dim, qwen3.has_qk_norm, qwen3.is_tied) == (8, True, True)
    assert llama.message_dtype == "float32" and not llama.rope.is_interleaved
    assert qwen3.attention_scale == 8**-0.5
    heads = LLAMA | {"num_key_value_heads": None}
    assert config_of(heads).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"sliding_window": 8}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (0, 0)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 2)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, 1),
        ),
    ],
)
def test_windows_of_qwen3(config_of, change, window):
    config = config_of(QWEN3 | change)
    assert (config.window, config.window_layers) == window


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "model_type and architectures name no model"),
        (LLAMA | {"model_type": "gemma"}, "field model_type is 'gemma', must be one of"),
        (LLAMA | {"architectures": ["Other"]}, r"field architectures is \['Other'\], must be"),
        (LLAMA | {"model_type": "qwen3"}, "name llama and qwen3, must name one of"),
        (LLAMA | {"hidden_size": None}, "field hidden_size is missing"),
        (LLAMA | {"hidden_size": "16"}, "field hidden_size is '16', must be an integer"),
        (LLAMA | {"hidden_size": 0}, "hidden is 0, must be an integer from 1"),
        (LLAMA | {"num_attention_heads": 0}, "field num_attention_heads is 0, must be at least 1"),
        (LLAMA | {"num_key_value_heads": -2}, "numbers of heads and intermediate_size"),
        (LLAMA | {"num_hidden_layers": 2**60}, "num_layers is 1152921504606846976"),
        (LLAMA | {"hidden_act": "gelu"}, "field hidden_act is 'gelu', must be \"silu\""),
        (LLAMA | {"attention_bias": True}, "field attention_bias is True, must be false"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "of quantised files only GGUF is read"),
        (LLAMA | {"rms_norm_eps": 10**400}, "field rms_norm_eps is 1.* must be a number"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "field type is 'yarn', must be one of"),
        (LLAMA | {"rope_scaling": 3}, "field rope_scaling is 3, must be an object"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "field factor is missing"),
        (LLAMA | {"rope_theta": -1}, r"theta of RoPE is -1\.0"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, must be 1"),
        (QWEN3 | {"head_dim": None}, "field head_dim is missing"),
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "field max_window_layers is 1, must be 0",
        ),
        (LANEFORMER | {"num_lanes": None}, "field num_lanes is missing"),
        (LANEFORMER | {"swa_layers": None}, "swa_layers or sliding_window_n_layers is missing"),
        (LANEFORMER | {"swa_layers": [1, 2]}, r"field swa_layers is \[1, 2\], must be the layers"),
        (LANEFORMER | {"sliding_window_n_layers": 1}, "mean the same and differ"),
        (LANEFORMER | {"pre_norm_lane_agg": True}, "field pre_norm_lane_agg is True"),
        (LANEFORMER | {"replicated_rmsn_scale": False}, "replicated_rmsn_scale is False"),
        (LANEFORMER | {"lm_head_type": "other"}, "lm_head is 'other', must be one of"),
    ],
)
def test_a_wrong_configuration_names_file_and_field(config_of, config, told):
    with pytest.raises(kccl.Error, match=told) as caught:
        config_of(config)
    assert "config.json: " in str(caught.value) and "\n" not in str(caught.value)


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-8, 64),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 4), max_size=4),
    st.dictionaries(st.sampled_from([*LLAMA3, "type", "rope_theta"]), st.floats(), max_size=3),
)
FIELDS = sorted({*LLAMA, *QWEN3, *LANEFORMER, "rope_scaling", "rope_parameters", "layer_types"})
FIELDS += ["use_sliding_window", "max_window_layers", "broadcast_delay", "rope_theta"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([LLAMA, QWEN3, LANEFORMER]), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_configuration_is_taken_or_refused_in_one_line(config_of, config, change):
    try:
        taken = config_of(config | change)
    except kccl.Error as error:
        assert "config.json: " in str(error) and "\n" not in str(error)
    else:
        assert taken.num_parameters() > 0


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
        with pytest.raises(kccl.Error, match=f"tensor {name} has a weight that is NaN or infinite"):
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
