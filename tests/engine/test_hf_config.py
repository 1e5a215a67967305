"""config.json of Hugging Face's layout: what each field becomes, and what is refused."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import LANEFORMER, LLAMA, MISTRAL, QWEN2, QWEN3, write_folder

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.hf_config import read_config
from kccl.engine.model.rope import LinearScaling, Llama3Scaling, Rope

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
        ({"swa_layers": [1, 2]}, "window_layers", (1, 2)),
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


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"max_window_layers": 1}, [0, 9]),
        ({"max_window_layers": -1}, [9, 9]),
        # transformers' defaults: 28 layers, and 4096 where the field is missing but not null.
        ({}, [0, 0]),
        ({"max_window_layers": 0, "sliding_window": ...}, [4096, 4096]),
        ({"max_window_layers": 0, "sliding_window": None}, [0, 0]),
        ({"max_window_layers": 0, "layer_types": [FULL, SLIDING]}, [0, 9]),
        ({"use_sliding_window": False, "layer_types": [FULL, FULL]}, [0, 0]),
    ],
)
def test_windows_of_qwen2(config_of, change, windows):
    fields = QWEN2 | {"use_sliding_window": True, "sliding_window": 9} | change
    config = config_of({name: value for name, value in fields.items() if value is not ...})
    assert [config.window_of(layer) for layer in range(2)] == windows


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"sliding_window": 4}, 4),
        ({"sliding_window": None}, 0),
        ({}, 4096),
        ({"sliding_window": 4, "layer_types": [SLIDING, SLIDING]}, 4),
    ],
)
def test_windows_of_mistral(config_of, change, window):
    config = config_of(MISTRAL | change)
    assert [config.window_of(layer) for layer in range(2)] == [window, window]


def test_a_window_of_llama_limits_the_cache_of_transformers(config_of):
    for neutral in ({"sliding_window": 64}, {"sliding_window": None, "layer_types": [FULL, FULL]}):
        assert config_of(LLAMA | neutral).window == 0
    for change, told in (
        ({"sliding_window": 63}, "sliding_window is 63, must be absent or at least the context, 6"),
        ({"layer_types": [FULL, SLIDING]}, "layer_types is .*, must be 2 times 'full_attention'"),
    ):
        with pytest.raises(kccl.Error, match=told):
            config_of(LLAMA | change)


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2, QWEN3])
@pytest.mark.parametrize("value", [False, None, 0])
def test_attention_to_later_tokens_is_refused(config_of, config, value):
    with pytest.raises(kccl.Error, match=f"is_causal is {value}, must be absent or true"):
        config_of(config | {"is_causal": value})


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (QWEN2, ("qkv",)),
        (MISTRAL, ()),
        (LLAMA | {"attention_bias": False, "mlp_bias": False}, ()),
        (LLAMA | {"attention_bias": True}, ("qkv", "out")),
        (LLAMA | {"mlp_bias": True}, ("gate_up", "down")),
        (QWEN3 | {"attention_bias": True}, ("qkv", "out")),
    ],
)
def test_biases(config_of, config, biases):
    assert config_of(config).biases == biases


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "model_type and architectures name no model"),
        (LLAMA | {"model_type": "gemma"}, "field model_type is 'gemma', must be one of"),
        (LLAMA | {"architectures": ["Other"]}, r"field architectures is \['Other'\], must be"),
        (LLAMA | {"model_type": "qwen3"}, "name llama and qwen3, must name one of"),
        (LLAMA | {"hidden_size": None}, "field hidden_size is missing"),
        (LLAMA | {"hidden_size": "16"}, "field hidden_size is '16', must be an integer"),
        (LLAMA | {"hidden_size": 0}, "json: hidden_size is 0, must be an integer from 1"),
        (LLAMA | {"num_attention_heads": 0}, "field num_attention_heads is 0, must be at least 1"),
        (LLAMA | {"num_key_value_heads": -2}, "num_key_value_heads is -2, must be at least 1"),
        (LLAMA | {"intermediate_size": 0}, "field intermediate_size is 0, must be at least 1"),
        (LLAMA | {"num_hidden_layers": 2**60}, "num_hidden_layers is 1152921504606846976"),
        (LLAMA | {"max_position_embeddings": 0}, "json: max_position_embeddings is 0"),
        (LLAMA | {"rms_norm_eps": 0}, "json: rms_norm_eps is 0.0, must be a number above 0"),
        (
            LLAMA | {"num_key_value_heads": 3},
            "json: num_attention_heads is 4, must be divisible by num_key_value_heads, 3",
        ),
        (
            LLAMA | {"hidden_size": 12},
            "json: hidden_size / num_attention_heads is 3, must be even",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "field hidden_act is 'gelu', must be \"silu\""),
        (MISTRAL | {"attention_bias": True}, "field attention_bias is True, must be false in a"),
        (QWEN3 | {"mlp_bias": True}, "field mlp_bias is True, must be false in a model of the fam"),
        (LANEFORMER | {"attention_bias": True}, "field attention_bias is True, must be false"),
        (LLAMA | {"mlp_bias": 1}, "field mlp_bias is 1, must be true or false"),
        (MISTRAL | {"sliding_window": 0}, "field sliding_window is 0, must be at least 1"),
        (
            MISTRAL | {"sliding_window": 4, "layer_types": [FULL, SLIDING]},
            "field layer_types is .*, must be 2 times 'sliding_attention'",
        ),
        (
            QWEN2 | {"layer_types": [FULL, SLIDING]},
            "field layer_types is .*, must be all 'full_attention', because use_sliding_window",
        ),
        (QWEN2 | {"layer_types": [FULL, "chunked"]}, "field layer_types is .*, must be a list of"),
        (QWEN2 | {"layer_types": [FULL]}, "field layer_types is .*, must be a list of 2 entries"),
        (LANEFORMER | {"quantization_config": {"bits": 4}}, "absent in a Laneformer"),
        (LLAMA | {"rms_norm_eps": 10**400}, "field rms_norm_eps is 1.* must be a number"),
        (LLAMA | {"rope_scaling": {"type": "su"}}, "field type is 'su', must be one of"),
        (LLAMA | {"rope_scaling": 3}, "field rope_scaling is 3, must be an object"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "field factor is missing"),
        (LLAMA | {"rope_theta": -1}, r"field rope_theta is -1, must be a number above 0"),
        (
            LLAMA | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}},
            "field original_max_position_embeddings is 0, must be at least 1",
        ),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, must be 1"),
        (QWEN3 | {"head_dim": None}, "field head_dim is missing"),
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "field sliding_window is 0, must be at least 1",
        ),
        (LANEFORMER | {"num_lanes": None}, "field num_lanes is missing"),
        (LANEFORMER | {"swa_layers": None}, "swa_layers or sliding_window_n_layers is missing"),
        (LANEFORMER | {"swa_layers": [1, 3]}, r"json: swa_layers is \(1, 3\), must be numbers of"),
        (LANEFORMER | {"swa_layers": [1, 0]}, r"json: swa_layers is \(1, 0\), must be numbers of"),
        (LANEFORMER | {"sliding_window_n_layers": 1}, "mean the same and differ"),
        (LANEFORMER | {"pre_norm_lane_agg": True}, "field pre_norm_lane_agg is True"),
        (LANEFORMER | {"replicated_rmsn_scale": False}, "replicated_rmsn_scale is False"),
        (LANEFORMER | {"lm_head_type": "other"}, "json: lm_head_type is 'other', must be one"),
        (LANEFORMER | {"swa_layers": 9}, "json: swa_layers is 9, must be an integer from 0 to"),
        (
            LANEFORMER | {"swa_layers": None, "sliding_window_n_layers": 9},
            "json: sliding_window_n_layers is 9, must be",
        ),
        (LANEFORMER | {"broadcast_delay": 9}, "json: broadcast_delay is 9, must be an integer"),
        (
            LANEFORMER | {"broadcast_delay": 0, "use_comm": False},
            "json: use_comm is False, must be True where broadcast_delay is 0",
        ),
        (
            LANEFORMER | {"broadcast_delay": 0, "use_mlp_comm": False},
            "json: use_mlp_comm is False, must be True where broadcast_delay is 0",
        ),
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
FIELDS += [
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "broadcast_delay",
    "rope_theta",
]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([LLAMA, QWEN2, QWEN3, MISTRAL, LANEFORMER]),
    st.dictionaries(st.sampled_from(FIELDS), JSON),
)
def test_any_configuration_is_taken_or_refused_in_one_line(config_of, config, change):
    try:
        taken = config_of(config | change)
    except kccl.Error as error:
        assert "config.json: " in str(error) and "\n" not in str(error)
    else:
        assert taken.num_parameters() > 0


def test_swish_is_silu(tmp_path):
    write_folder(tmp_path, LLAMA | {"hidden_act": "swish"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.hidden == LLAMA["hidden_size"]
