"""Llama, Mistral, Qwen2, Qwen3 and mixtures of experts against Hugging Face transformers, from
folders that it has written itself.
"""

import json

import numpy as np
import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.model.sample import SamplingParams, kept_ids, sample

pytestmark = pytest.mark.long

SHAPE = {"hidden_size": 96, "intermediate_size": 168, "num_hidden_layers": 4, "vocab_size": 200}
SHAPE |= {"max_position_embeddings": 256, "pad_token_id": None}
# Grouped queries. The factors of Llama 3.1, for a context short enough that scaling matters here.
LLAMA = SHAPE | {"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True}
LLAMA_31 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0}
LLAMA_31 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_31 |= {"original_max_position_embeddings": 64}
# The heads are wider than hidden / heads.
QWEN3 = SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24}
QWEN3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
# Three query heads for each KV head.
QWEN2 = SHAPE | {"num_attention_heads": 12, "num_key_value_heads": 4}
QWEN3_MOE = QWEN3 | {"moe_intermediate_size": 44, "num_experts": 6, "num_experts_per_tok": 3}
# Its YaRN is that of the class: factor 32, and a ramp whose ends are not rounded.
GPT_OSS = SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24}
GPT_OSS |= {"intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS |= {"sliding_window": 20}
SLIDING, FULL = "sliding_attention", "full_attention"
IDS = np.random.default_rng(5).integers(SHAPE["vocab_size"], size=150).tolist()


def write(folder, kind, config):
    """Writes a checkpoint with random weights in BF16; returns its model in FP32."""
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            spread = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(spread * noise + name.endswith("norm.weight"))
    # Several files, with an index.
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**LLAMA, rope_parameters=LLAMA_31)),
        (LlamaForCausalLM, LlamaConfig(**LLAMA | {"tie_word_embeddings": False})),
        (
            LlamaForCausalLM,
            LlamaConfig(
                **LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
                rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            ),
        ),
        (Qwen3ForCausalLM, Qwen3Config(**QWEN3, tie_word_embeddings=True)),
        (Qwen3ForCausalLM, Qwen3Config(**QWEN3, tie_word_embeddings=False)),
        (
            Qwen3ForCausalLM,
            Qwen3Config(**QWEN3, use_sliding_window=True, sliding_window=20, max_window_layers=0),
        ),
        (
            Qwen3ForCausalLM,
            Qwen3Config(
                **QWEN3,
                attention_bias=True,
                use_sliding_window=True,
                sliding_window=20,
                layer_types=[FULL, SLIDING, FULL, SLIDING],
            ),
        ),
        (LlamaForCausalLM, LlamaConfig(**LLAMA, attention_bias=True)),
        (LlamaForCausalLM, LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
        (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=None)),
        (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=33, head_dim=16)),
        (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=1)),
        (Qwen2ForCausalLM, Qwen2Config(**QWEN2)),
        (
            Qwen2ForCausalLM,
            Qwen2Config(**QWEN2, use_sliding_window=True, sliding_window=16, max_window_layers=3),
        ),
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(**QWEN3_MOE, use_sliding_window=True, sliding_window=20),
        ),
        (
            MixtralForCausalLM,
            MixtralConfig(**QWEN2, num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
        ),
        (GptOssForCausalLM, GptOssConfig(**GPT_OSS)),
        (
            GptOssForCausalLM,
            GptOssConfig(
                **GPT_OSS,
                layer_types=[FULL, FULL, SLIDING, FULL],
                swiglu_limit=0.4,
                attention_bias=False,
            ),
        ),
    ],
    ids=[
        *("llama-3.1", "llama-untied", "llama-linear", "qwen3-tied", "qwen3", "qwen3-window"),
        *("qwen3-some-windows-biases", "llama-attention-biases", "llama-all-biases", "mistral"),
        *("mistral-window", "mistral-window-of-1", "qwen2", "qwen2-some-windows"),
        *("qwen3-moe", "qwen3-moe-not-normalised", "mixtral", "gpt-oss", "gpt-oss-other-layers"),
    ],
)
def test_logits(kind, config, tmp_path, assert_close):
    model = write(tmp_path, kind, config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.num_lanes > 1
        assert_close(Reference(checkpoint).logits(IDS), logits_of(model), 2e-5)


def test_rope_scaling_matters_here(tmp_path):
    """Without this, the agreement above would say nothing about it."""
    scaled = write(tmp_path, LlamaForCausalLM, LlamaConfig(**LLAMA, rope_parameters=LLAMA_31))
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    plain["rope_parameters"] = {"rope_type": "default", "rope_theta": LLAMA_31["rope_theta"]}
    path.write_text(json.dumps(plain))
    with open_checkpoint(tmp_path) as checkpoint:
        difference = Reference(checkpoint).logits(IDS) - logits_of(scaled)
    assert np.abs(difference).max() > 0.05


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("parameters", FILTERS, ids=lambda value: "-".join(value) or "none")
def test_filters_keep_what_transformers_keeps(parameters):
    params = SamplingParams(**{"temperature": 1.0} | parameters)
    processors = [
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        TemperatureLogitsWarper(params.temperature),
    ]
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    for seed in range(20):
        random = np.random.default_rng(seed)
        logits = (3 * random.standard_normal(300)).astype(np.float32)
        history = random.integers(300, size=50)
        scores = torch.tensor(logits)[None].double()
        for process in processors:
            scores = process(torch.tensor(history)[None], scores)
        wanted = np.flatnonzero(np.isfinite(scores[0].numpy()))
        drawn = [sample(logits, params, position, history)[0] for position in range(40)]
        assert set(drawn) <= set(wanted.tolist())
        if params.repetition_penalty == 1:
            scaled = logits.astype(np.float64) / params.temperature
            assert kept_ids(scaled, params).tolist() == wanted.tolist()
