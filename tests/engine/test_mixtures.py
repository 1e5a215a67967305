"""Mixtures of experts, in folders of Hugging Face's layout and in GGUF files."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
from mixtures import (
    GPT_OSS,
    MXFP4_CONFIG,
    QWEN3_MOE,
    in_blocks,
    tensors_of,
    write_mixture,
)
from quantized_folders import fp8, write_tensors
from tiny_models import LLAMA, write_folder

import kccl
from kccl.engine import Engine
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.hf_config import read_config
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.formats.mxfp4 import MXFP4
from kccl.engine.formats.table import ON_HOST
from kccl.engine.model.experts import Experts
from kccl.engine.model.rope import Rope

IDS = np.random.default_rng(3).integers(256, size=40).tolist()
EXPERTS = "model.layers.1.mlp.experts"


def logits_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return Reference(checkpoint).logits(IDS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folders of one gpt-oss, in MXFP4 and in BF16."""
    folders = [tmp_path_factory.mktemp(name) for name in ("blocks", "exact")]
    tensors = in_blocks(tensors_of(GPT_OSS))
    write_folder(folders[0], GPT_OSS | {"quantization_config": MXFP4_CONFIG}, tensors[0])
    write_folder(folders[1], GPT_OSS, tensors[1])
    return folders


def test_blocks_are_the_numbers_that_they_mean(stored):
    in_mxfp4, exact = map(logits_of, stored)
    assert (in_mxfp4 == exact).all() and 0.1 < exact.std() < 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_multiplies_blocks_as_they_are_stored(stored, ranks):
    wanted = logits_of(stored[1])
    with open_checkpoint(stored[0]) as checkpoint:
        kept = checkpoint.as_stored(ON_HOST)
        assert {kept.formats[f"expert_{each}"].name for each in ("gate_up", "down")} == {"mxfp4"}
    with Engine(stored[0], ranks=ranks, blocks=1) as engine:
        found = engine.logits(IDS)
    assert np.abs(found - wanted).max() < 2e-3 * wanted.std()


def test_a_folder_says_what_its_mixture_is(stored, tmp_path):
    with open_checkpoint(stored[0]) as checkpoint:
        config = checkpoint.config
        assert checkpoint.stored == ("BF16", "MXFP4")
    assert config.experts == Experts(num=5, chosen=2)
    assert config.has_sinks and config.swiglu_limit == 7 and config.window_layers == 1
    assert config.biases == ("qkv", "out", "router", "expert_gate_up", "expert_down")
    # A lane has whole blocks.
    assert config.num_lanes == 2 and not config.rope.scaling.truncate
    write_folder(tmp_path, QWEN3_MOE | {"norm_topk_prob": False}, tensors_of(QWEN3_MOE))
    with open_checkpoint(tmp_path) as checkpoint:
        config = checkpoint.config
    assert config.experts == Experts(num=5, chosen=2, is_normalised=False)
    assert (config.ffn, config.has_qk_norm, config.biases) == (12, True, ())


@pytest.mark.parametrize("config", [QWEN3_MOE, GPT_OSS], ids=["qwen3-moe", "gpt-oss"])
def test_an_answer_is_the_references(config, tmp_path):
    write_folder(tmp_path, config, tensors_of(config))
    wanted = logits_of(tmp_path)
    with Engine(tmp_path, ranks=2, blocks=1) as engine:
        # 32 positions run at a time, and the rest alone, as tokens of an answer do.
        found = engine.logits(IDS)
        ids = engine.generate(IDS[:30], max_tokens=12).ids
    assert np.abs(found - wanted).max() < 1e-4 * wanted.std()
    with open_checkpoint(tmp_path) as checkpoint:
        logits = Reference(checkpoint).logits([*IDS[:30], *ids])
    assert ids == logits[29:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, must be 1: every layer"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], must be empty"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8"),
        (QWEN3_MOE, {"num_experts": None}, "field num_experts or num_local_experts is missing"),
        (QWEN3_MOE, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, must be at most 5"),
        (QWEN3_MOE, {"num_experts": 1025}, "num_experts is 1025, must be at most 1024"),
        (QWEN3_MOE, {"num_experts": 999, "num_hidden_layers": 999}, "at most 131072 experts"),
        (QWEN3_MOE, {"use_qk_norm": False}, "use_qk_norm is False, must be absent or true"),
        (QWEN3_MOE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', must be absent or"),
        (GPT_OSS, {"rope_scaling": None}, "field rope_parameters or rope_scaling is missing"),
        (QWEN3_MOE, {"num_experts": 6}, r"gate\.weight has shape \[5, 16\], must"),
        (GPT_OSS, {"swiglu_alpha": 1.5}, r"swiglu_alpha is 1\.5, must be 1\.702"),
        (GPT_OSS, {"experts_per_token": 3}, "num_experts_per_tok and experts_per_token mean the"),
        (
            GPT_OSS,
            {"sliding_window": None},
            "sliding_window is None, must be given, because layers",
        ),
        (GPT_OSS, {"num_local_experts": 6}, r"gate_up_proj has shape \[5, 64, 128\], must have"),
    ],
)
def test_another_mixture_is_refused_by_name(config, change, told, tmp_path):
    write_folder(tmp_path, config | change, tensors_of(config))
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (f"{EXPERTS}.down_proj_scales", None, "tensor .*down_proj_scales is missing"),
        (f"{EXPERTS}.gate_up_proj_blocks", None, r"tensor .*gate_up_proj is missing"),
        (f"{EXPERTS}.down_proj_blocks", np.int32, "has dtype I32, must"),
        (f"{EXPERTS}.down_proj_scales", lambda x: x[:, :-1].copy(), r"shape \[5, 63, 2\]"),
    ],
)
def test_damaged_blocks_are_named(name, change, told, tmp_path):
    tensors, _ = in_blocks(tensors_of(GPT_OSS))
    held = tensors.pop(name)
    if change is not None:
        tensors[name] = held.astype(change) if change is np.int32 else change(held)
    write_folder(tmp_path, GPT_OSS | {"quantization_config": MXFP4_CONFIG}, tensors)
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path)


def test_a_scale_that_is_no_number_is_found(tmp_path):
    tensors, _ = in_blocks(tensors_of(GPT_OSS))
    tensors[f"{EXPERTS}.down_proj_scales"][3, 5, 1] = 255
    write_folder(tmp_path, GPT_OSS | {"quantization_config": MXFP4_CONFIG}, tensors)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(kccl.Error, match=r"experts.3.down_proj.weight has a weight that is NaN"),
    ):
        checkpoint.tensor("layers.1.experts.3.w2")


def test_experts_in_fp8_are_multiplied_as_they_are_stored(tmp_path):
    """Qwen3-30B-A3B-FP8's layout: the router, which the file names, stays in BF16."""
    config = QWEN3_MOE | {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 32}
    tensors, exact = {}, {}
    for index, (name, each) in enumerate(tensors_of(config).items()):
        tensors[name] = exact[name] = each
        if ".experts." in name:
            noise = np.random.default_rng(index)
            of_layer, exact[name] = fp8(
                noise, each.shape, block=(128, 128), name="weight_scale_inv"
            )
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.{part}": array for part, array in of_layer.items()}
    kept = ["self_attn", "lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))]
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = tmp_path / "m"
    folder.mkdir()
    write_tensors(folder / "model.safetensors", tensors)
    given = config | {"quantization_config": method | {"modules_to_not_convert": kept}}
    (folder / "config.json").write_text(json.dumps(given))
    with open_checkpoint(folder) as checkpoint:
        stored = checkpoint.as_stored(ON_HOST)
        assert {stored.formats[f"expert_{each}"].name for each in ("gate_up", "down")} == {
            "e4m3_128"
        }
        assert stored.formats["router"].name == "bfloat16"
        wanted = Reference(stored).logits(IDS)
        w2 = stored.read("layers.1.experts.3.w2").to_float32().transpose(1, 0, 2)
        down = exact["model.layers.1.mlp.experts.3.down_proj.weight"]
        np.testing.assert_array_equal(w2.reshape(down.shape), down)
        with Engine(checkpoint, ranks=2, blocks=1) as engine:
            found = engine.logits(IDS)
    assert np.abs(found - wanted).max() < 1e-4 * wanted.std()


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_experts_are_rounded_when_that_is_asked_for(weights):
    checkpoint = random_checkpoint("tiny-gpt-oss").as_weights(weights)
    wanted = 64 if weights == "int4" else 32
    assert checkpoint.formats["expert_gate_up"].block == wanted
    wanted = Reference(checkpoint).logits(IDS[:9])
    with Engine(random_checkpoint("tiny-gpt-oss"), blocks=1, weights=weights) as engine:
        found = engine.logits(IDS[:9])
    assert np.abs(found - wanted).max() < 1e-4 * wanted.std()


# ---- GGUF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [QWEN3_MOE, GPT_OSS], ids=["qwen3-moe", "gpt-oss"])
def test_a_file_is_the_same_model_as_a_folder(config, tmp_path):
    tensors = tensors_of(config)
    write_folder(tmp_path / "m", config, tensors)
    write_mixture(tmp_path / "m.gguf", config, tensors)
    with (
        open_checkpoint(tmp_path / "m") as folder,
        open_checkpoint(tmp_path / "m.gguf") as file,
    ):
        # The file has the epsilon in FP32.
        assert replace(folder.config, norm_eps=file.config.norm_eps) == file.config
        for name in folder.names():
            assert (folder.tensor(name) == file.tensor(name)).all(), name
    with Engine(tmp_path / "m.gguf", ranks=2, blocks=1) as engine:
        found = engine.logits(IDS)
    wanted = logits_of(tmp_path / "m")
    assert np.abs(found - wanted).max() < 1e-4 * wanted.std()


def test_a_file_with_mxfp4_is_multiplied_as_it_is_stored(tmp_path):
    _, exact = in_blocks(tensors_of(GPT_OSS))
    write_folder(tmp_path / "m", GPT_OSS, exact)
    plain = write_mixture(tmp_path / "plain.gguf", GPT_OSS, exact)
    words = {
        name: (MXFP4.from_values(each), gguf.GGMLQuantizationType.MXFP4)
        for name, each in plain.items()
        if name.endswith("exps.weight")
    }
    write_mixture(tmp_path / "m.gguf", GPT_OSS, exact, **words)
    assert (logits_of(tmp_path / "m.gguf") == logits_of(tmp_path / "m")).all()
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.as_stored(ON_HOST).formats["expert_down"].name == "mxfp4"


def test_gate_and_up_may_be_one_tensor(tmp_path):
    tensors = tensors_of(QWEN3_MOE)
    apart = write_mixture(tmp_path / "apart.gguf", QWEN3_MOE, tensors)
    joined = {}
    for layer in range(2):
        names = [f"blk.{layer}.ffn_{each}_exps.weight" for each in ("gate", "up")]
        both = np.concatenate([apart[name] for name in names], axis=1)
        joined |= dict.fromkeys(names) | {f"blk.{layer}.ffn_gate_up_exps.weight": both}
    write_mixture(tmp_path / "m.gguf", QWEN3_MOE, tensors, **joined)
    assert (logits_of(tmp_path / "m.gguf") == logits_of(tmp_path / "apart.gguf")).all()


@pytest.mark.parametrize(
    ("replaced", "told"),
    [
        ({"blk.1.ffn_up_exps.weight": None}, r"blk\.1\.ffn_up_exps\.weight, expert 0 is missing"),
        ({"blk.0.attn_sinks.weight": None}, r"tensor blk\.0\.attn_sinks\.weight is missing"),
        ({"blk.1.ffn_down_exps.bias": None}, r"ffn_down_exps\.bias, expert 0 is missing"),
        (
            {"blk.1.ffn_gate_exps.bias": np.zeros((5, 32), np.float32)},
            r"expert 0 has shape \[32\], must have \[64\]",
        ),
        (
            {"blk.1.ffn_gate_exps.bias": np.zeros((4, 64), np.float32)},
            r"ffn_gate_exps\.bias has shape \[4, 64\], must have 5 experts",
        ),
    ],
)
def test_a_damaged_file_is_named(replaced, told, tmp_path):
    write_mixture(tmp_path / "m.gguf", GPT_OSS, tensors_of(GPT_OSS), **replaced)
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("config", "key", "value", "told"),
    [
        (QWEN3_MOE, "expert_used_count", 6, "expert_used_count is 6, must be at most 5"),
        (QWEN3_MOE, "expert_count", 2000, "expert_count is 2000, must be at most 1024"),
        (QWEN3_MOE, "expert_shared_count", 1, "expert_shared_count is 1, must be absent or 0"),
        (QWEN3_MOE, "expert_gating_func", 2, "expert_gating_func is 2, must be absent or 0 or 1"),
        (GPT_OSS, "attention.sliding_window_pattern", 1, "pattern is 1, must be absent or 2"),
    ],
)
def test_other_keys_are_refused_by_name(config, key, value, told, tmp_path):
    def changed(writer):
        whole = f"{writer.arch}.{key}"
        for part in writer.kv_data:
            part.pop(whole, None)
        writer.add_uint32(whole, value)

    write_mixture(tmp_path / "m.gguf", config, tensors_of(config), change=changed)
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path / "m.gguf")


def test_gate_and_up_in_one_tensor_have_as_many_rows(tmp_path):
    names = [f"blk.1.ffn_{each}_exps.weight" for each in ("gate", "up")]
    joined = dict.fromkeys(names) | {
        "blk.1.ffn_gate_up_exps.weight": np.zeros((5, 25, 16), np.float32)
    }
    write_mixture(tmp_path / "m.gguf", QWEN3_MOE, tensors_of(QWEN3_MOE), **joined)
    with pytest.raises(kccl.Error, match=r"gate_up_exps\.weight has 25 rows, must have as many"):
        open_checkpoint(tmp_path / "m.gguf")


# ---- Rules ---------------------------------------------------------------------------------------

# What makers of models have published, without what says nothing of the weights.
PUBLISHED = {
    "Qwen3-30B-A3B": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128},
        **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144},
        **{"max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": []},
        **{"moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32},
        **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48},
        **{"num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6},
        **{"rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001},
        **{"sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False},
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
        **{"attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002},
        **{"experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880},
        **{"initial_context_length": 4096, "intermediate_size": 2880, "num_hidden_layers": 24},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        **{"max_position_embeddings": 131072, "num_attention_heads": 64},
        **{"num_experts_per_tok": 4, "num_key_value_heads": 8, "num_local_experts": 32},
        **{"output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-5},
        "rope_scaling": GPT_OSS["rope_scaling"],
        **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128},
        **{"swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088},
    },
}
# The Coder has a few fields more.
PUBLISHED["Qwen3-Coder-30B-A3B"] = PUBLISHED["Qwen3-30B-A3B"] | {
    **{"max_position_embeddings": 262144, "qkv_bias": False, "rope_theta": 1e7},
    **{"shared_expert_intermediate_size": 0, "use_qk_norm": True},
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_configurations_are_read(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = read_config(tmp_path / "config.json")
    if name == "Qwen3-Coder-30B-A3B":
        shape = replace(MODELS["qwen3-30b-a3b"], context=262144, rope=Rope(theta=1e7))
    else:
        shape = MODELS[name.lower()]
    assert config == shape


def test_fields_that_are_left_out_are_those_of_the_class(tmp_path):
    mixtral = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    mixtral |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    del mixtral["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    config = read_config(tmp_path / "config.json")
    assert (config.norm_eps, config.rope.theta) == (1e-5, 1e6)


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_equal_experts_the_host_takes_the_first(ranks, tmp_path):
    tensors = tensors_of(QWEN3_MOE)
    for layer in range(2):
        router = tensors[f"model.layers.{layer}.mlp.gate.weight"]
        router[1:] = router[0]
    write_folder(tmp_path, QWEN3_MOE, tensors)
    wanted = logits_of(tmp_path)
    with Engine(tmp_path, ranks=ranks, blocks=1) as engine:
        assert np.abs(engine.logits(IDS) - wanted).max() < 1e-4 * wanted.std()


@pytest.mark.parametrize("name", ["router_bias", "experts.3.b1"])
def test_a_sum_that_is_no_number_is_found(name):
    """Weights are finite, and sums may not be."""
    checkpoint = random_checkpoint("tiny-gpt-oss")
    read = checkpoint.read

    def spoilt(each, lanes=None):
        found = read(each, lanes)
        if each == f"layers.2.{name}":
            found.words.view(np.float32)[...] = np.nan
        return found

    checkpoint.read = spoilt
    with Engine(checkpoint, blocks=1) as engine:
        logits = engine.logits(IDS)
    # Every position passes the router, and some pass the expert.
    assert np.isnan(logits).all() if name == "router_bias" else np.isnan(logits).any()
