"""What RoPE becomes of a config.json and of a GGUF file, and what is refused."""

import json

import gguf
import numpy as np
import pytest
from tiny_models import LANEFORMER, LLAMA, QWEN3, write_folder, write_gguf

import kccl
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.hf_config import read_config
from kccl.engine.model.rope import LinearScaling, Llama3Scaling, Rope, TableScaling
from kccl.engine.model.rope_scaling import (
    ChainedScaling,
    DynamicScaling,
    LongRopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

# LLAMA has a context of 64, and two pairs a head.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [3.0, 4.0]}
USUAL = yarn_attention_factor(4.0)

# ---- config.json -------------------------------------------------------------------------------


def read(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        (
            {"rope_type": "dynamic", "factor": 2},
            Rope(scaling=DynamicScaling(2.0, 64)),
        ),
        (YARN, Rope(scaling=YarnScaling(4.0, 16), attention_factor=USUAL)),
        (
            {"type": "yarn", "factor": 4.0, "rope_theta": 5e5, "finetuned": True},
            Rope(theta=5e5, scaling=YarnScaling(4.0, 64), attention_factor=USUAL),
        ),
        (
            YARN | {"attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2, "truncate": False},
            Rope(scaling=YarnScaling(4.0, 16, 8.0, 2.0, False), attention_factor=1.5),
        ),
        (
            YARN | {"mscale": 0.5, "mscale_all_dim": 2.0},
            Rope(
                scaling=YarnScaling(4.0, 16),
                attention_factor=yarn_attention_factor(4, 0.5) / yarn_attention_factor(4, 2),
            ),
        ),
        # Zero counts as not given, and one without the other is not used.
        (
            YARN | {"mscale": 0.5, "mscale_all_dim": 0, "beta_fast": 0, "beta_slow": None},
            Rope(scaling=YarnScaling(4.0, 16), attention_factor=USUAL),
        ),
        (YARN | {"factor": None}, Rope(scaling=YarnScaling(4.0, 16), attention_factor=USUAL)),
        (
            LONG | {"original_max_position_embeddings": 16},
            Rope(
                scaling=LongRopeScaling((1.0, 2.0), (3.0, 4.0), 16),
                # sqrt(1 + log 4 / log 16)
                attention_factor=1.5**0.5,
            ),
        ),
        (
            LONG | {"original_max_position_embeddings": 16, "factor": 16.0},
            Rope(scaling=LongRopeScaling((1.0, 2.0), (3.0, 4.0), 16), attention_factor=2**0.5),
        ),
        (LONG, Rope(scaling=LongRopeScaling((1.0, 2.0), (3.0, 4.0), 64))),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_scalings_of_a_configuration(tmp_path, name, parameters, rope):
    found = read(tmp_path, LLAMA | {name: parameters}).rope
    assert found.attention_factor == pytest.approx(rope.attention_factor, rel=1e-12)
    assert (found.theta, found.scaling) == (rope.theta, rope.scaling)


@pytest.mark.parametrize("parameters", [YARN, LONG | {"original_max_position_embeddings": 16}])
def test_the_original_context_outside_the_parameters_counts_first(tmp_path, parameters):
    """As in transformers."""
    config = LLAMA | {"rope_scaling": parameters, "original_max_position_embeddings": 32}
    assert read(tmp_path, config).rope.scaling.original_context == 32


def test_llama_3_without_its_original_context(tmp_path):
    parameters = {"rope_type": "llama3", "factor": 8.0}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = read(tmp_path, LLAMA | {"rope_scaling": parameters}).rope
    assert found == Rope(scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))


@pytest.mark.parametrize("config", [LLAMA, QWEN3])
def test_switches_that_change_nothing(tmp_path, config):
    config = config | {"rope_interleaved": False, "partial_rotary_factor": 1.0, "rope_ratio": None}
    config |= {"use_mrope": False}
    config |= {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1}}
    assert read(tmp_path, config).rope == Rope()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved is True, must be false for the fam"),
        (QWEN3 | {"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0, must be absent"),
        (LLAMA | {"use_mrope": True}, "field use_mrope is True, must be absent"),
        (LLAMA | {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\], must be absent"),
        (LANEFORMER | {"rotary_pct": 0.25}, "rotary_pct is 0.25, must be 1, because the engine"),
        (LLAMA | {"max_position_embeddings": 10**400}, "max_position_embeddings is 1.* must be"),
        *(
            (LLAMA | {"rope_scaling": parameters}, told)
            for parameters, told in (
                ({"type": "mrope", "mrope_section": [1, 1]}, r"mrope_section is \[1, 1\], must be"),
                ({"rope_type": "default", "mrope_section": [1, 1]}, r"mrope_section is \[1, 1\]"),
                ({"rope_type": "proportional"}, "field rope_type is 'proportional', must be one"),
                (
                    {"rope_type": "default", "partial_rotary_factor": 0.5},
                    "factor is 0.5, must be 1",
                ),
                ({"full_attention": {"rope_type": "default"}}, "must be the same for all layers"),
                (YARN | {"mrope_interleaved": True}, "mrope_interleaved is True, must be absent"),
                ({"rope_type": "yarn"}, "field factor is missing"),
                (YARN | {"beta_slow": -1}, "field beta_slow is -1, must be at least 0"),
                (YARN | {"truncate": "no"}, "field truncate is 'no', must be true or false"),
                (YARN | {"attention_factor": 0}, "field attention_factor is 0, must be a number"),
                (YARN | {"original_max_position_embeddings": 2**31}, "is 2147483648, must be at"),
                (YARN | {"rope_theta": 1}, "theta of RoPE is 1.0, must be above 1 for the RoPE"),
                (LONG | {"short_factor": None}, "short_factor is None, must be a list of 2 numb"),
                (LONG | {"long_factor": [1]}, r"long_factor is \[1\], must be a list of 2 numbers"),
                (LONG | {"long_factor": [1, -1]}, r"long_factor\[1\] is -1, must be a number abo"),
                (LONG | {"original_max_position_embeddings": 1}, "is 1, must be at least 2"),
            )
        ),
    ],
)
def test_what_would_turn_otherwise_is_refused(tmp_path, config, told):
    with pytest.raises(kccl.Error, match=told) as caught:
        read(tmp_path, config)
    assert "config.json: " in str(caught.value) and "\n" not in str(caught.value)


# ---- GGUF --------------------------------------------------------------------------------------

TABLE = np.array([1, 8], np.float32)
SHORT, LONG_TABLE = {"rope_factors_short.weight": TABLE}, {"rope_factors_long.weight": 2 * TABLE}


def keys(family="llama", **values):
    """Writes keys behind "<family>.rope."; "__" stands for a dot."""

    def change(writer):
        for name, value in values.items():
            key = f"{family}.rope.{name.replace('__', '.')}"
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_float32(key, value)

    return change


CHAINED = ChainedScaling((TableScaling((1.0, 8.0)), LinearScaling(4.0)))
BOTH = LongRopeScaling((1.0, 8.0), (2.0, 16.0), 16)
GGUFS = {
    # llama.cpp takes a file without a type as linear.
    "factor alone": ({"scaling__factor": 4.0}, {}, LinearScaling(4.0), 1.0),
    "the old key": ({"scale_linear": 2.0}, {}, LinearScaling(2.0), 1.0),
    "both keys": ({"scale_linear": 2.0, "scaling__factor": 4.0}, {}, LinearScaling(4.0), 1.0),
    "zero is none": ({"scale_linear": 2.0, "scaling__factor": 0.0}, {}, None, 1.0),
    "none": ({"scaling__type": "none", "scaling__factor": 4.0}, {}, None, 1.0),
    "linear of nothing": ({"scaling__type": "linear"}, {}, None, 1.0),
    "table": ({}, {"rope_freqs.weight": TABLE}, TableScaling((1.0, 8.0)), 1.0),
    "table, linear": ({"scaling__factor": 4.0}, {"rope_freqs.weight": TABLE}, CHAINED, 1.0),
    "yarn": (
        {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 16},
        *({}, YarnScaling(4.0, 16), USUAL),
    ),
    "yarn of the context": (
        {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__yarn_beta_fast": 32.0},
        *({}, YarnScaling(4.0, 64), USUAL),
    ),
    "yarn and its factor": (
        {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__attn_factor": 1.5},
        *({}, YarnScaling(4.0, 64), 1.5 * USUAL),
    ),
    "attention factor": ({"scaling__attn_factor": 1.25}, {}, None, 1.25),
    "longrope": (
        {"scaling__type": "longrope", "scaling__original_context_length": 16},
        *(SHORT | LONG_TABLE, BOTH, 1.0),
    ),
    "longrope, linear": (
        {
            **{"scaling__type": "longrope", "scaling__original_context_length": 16},
            **{"scaling__factor": 4.0, "scaling__attn_factor": 1.25},
        },
        *(SHORT | LONG_TABLE, ChainedScaling((BOTH, LinearScaling(4.0))), 1.25),
    ),
}


@pytest.mark.parametrize("case", GGUFS)
def test_scalings_of_a_gguf_file(tmp_path, case):
    values, tensors, scaling, attention_factor = GGUFS[case]
    write_gguf(tmp_path / "m.gguf", tensors=tensors, change=keys(**values))
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        rope = checkpoint.config.rope
    assert (rope.theta, rope.is_interleaved, rope.scaling) == (1e4, True, scaling)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "tensors", "told"),
    [
        ({"scaling__type": "ntk"}, {}, "type is 'ntk', must be one of none, linear, yarn, longro"),
        ({"scaling__factor": -1.0}, {}, "scaling.factor is -1.0, must be a number above 0, or 0"),
        ({"scale_linear": np.inf}, {}, "rope.scale_linear is inf, must be a number above 0"),
        ({"scaling__attn_factor": 0.0}, {}, "attn_factor is 0.0, must be a number above 0"),
        ({"scaling__yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier is 0.1.*, must be 0: l"),
        ({"scaling__yarn_ext_factor": 1.0}, {}, "yarn_ext_factor is 1.0, must be 0: llama"),
        ({"scaling__yarn_beta_fast": 16.0}, {}, "yarn_beta_fast is 16.0, must be 32: llama"),
        ({"scaling__yarn_attn_factor": 1.3}, {}, "yarn_attn_factor is 1.2.*, must be 1: llama"),
        ({"dimension_count": 2}, {}, "rope.dimension_count is 2, must be the head's size, 4"),
        ({"dimension_sections": 1}, {}, "rope.dimension_sections is 1, must be absent"),
        ({"freq_base_swa": 1e4}, {}, "rope.freq_base_swa is 10000.0, must be absent"),
        ({}, SHORT, "rope_factors_short.weight does not belong to RoPE scaling 'linear'"),
        (
            {"scaling__type": "longrope"},
            {"rope_freqs.weight": TABLE},
            "rope_freqs.weight does not belong to RoPE scaling 'longrope'",
        ),
        ({"scaling__type": "longrope"}, SHORT, "tensor rope_factors_long.weight is missing"),
        (
            {"scaling__type": "longrope"},
            SHORT | {"rope_factors_long.weight": np.ones(3, np.float32)},
            r"rope_factors_long.weight has shape \[3\], must have \[2\] by the model's",
        ),
        (
            {
                **{"scaling__type": "yarn", "scaling__factor": 4.0},
                **{"scaling__original_context_length": 4},
            },
            *({}, "original context of RoPE scaling 'yarn' is 4, must be at least 7"),
        ),
    ],
)
def test_a_gguf_file_that_would_turn_otherwise_is_refused(tmp_path, values, tensors, told):
    write_gguf(tmp_path / "m.gguf", tensors=tensors, change=keys(**values))
    with pytest.raises(kccl.Error, match=told) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert "m.gguf: " in str(caught.value) and "\n" not in str(caught.value)


# ---- Both --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "values", "tensors"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"scale_linear": 4.0}, {}),
        (
            YARN,
            {
                **{"scaling__type": "yarn", "scaling__factor": 4.0},
                **{"scaling__original_context_length": 16},
            },
            {},
        ),
        (
            LONG | {"original_max_position_embeddings": 16},
            {
                **{"scaling__type": "longrope", "scaling__attn_factor": 1.5**0.5},
                **{"scaling__original_context_length": 16},
            },
            {
                "rope_factors_short.weight": np.array([1, 2], np.float32),
                "rope_factors_long.weight": np.array([3, 4], np.float32),
            },
        ),
    ],
    ids=["linear", "yarn", "longrope"],
)
def test_a_folder_and_a_file_of_the_same_model_agree(tmp_path, parameters, values, tensors):
    config = QWEN3 | {"rope_parameters": parameters, "head_dim": 4}
    written = write_folder(tmp_path / "folder", config)
    plain = {name: value.astype(np.float32) for name, value in written.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    renamed = {names.get_name(name, (".weight",)): value for name, value in plain.items()}
    change = keys("qwen3", **values)
    write_gguf(tmp_path / "m.gguf", family="qwen3", tensors=renamed | tensors, change=change)
    logits = []
    for path in ("folder", "m.gguf"):
        with open_checkpoint(tmp_path / path) as checkpoint:
            reference = Reference(checkpoint)
            logits.append([reference.logits(range(3, 3 + length)) for length in (16, 17, 40)])
    for of_folder, of_file in zip(*logits, strict=True):
        assert np.abs(of_folder - of_file).max() < 1e-4 * np.abs(of_folder).max()
