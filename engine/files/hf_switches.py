"""Refuses config.json files with settings that the engine does not support, but that would change a
model's logits.

transformers (release 5.24) applies some of these settings to every class of models: in its masks,
in its KV cache, in its configurations of single layers, and when it looks for the file of weights.
It reads the others only in classes that the engine does not support. A file with one of these may
hold such a model under a known name.
"""

from collections.abc import Callable, Collection
from typing import Any

from ..base.fields import Fields


def _is_off(value: Any) -> bool:
    return value in (False, 0, "", [], {})


def _is_one(value: Any) -> bool:
    return not isinstance(value, bool) and value in (0, 1)


_OFF = (_is_off, "absent, 0 or false")
_ONE = (_is_one, "absent or 1")
_SWITCHES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Fields that say whether tokens see later ones, which keys a layer sees or shares with another
    # layer, and what differs between layers. transformers applies is_causal, attention_chunk_size,
    # kv_sharing_modes and per_layer_config to every class.
    "is_causal": (bool, "absent or true"),
    # transformers does not take 0 as "no chunks" but as a chunk's size, so no value is neutral.
    "attention_chunk_size": (lambda _: False, "absent"),
    **dict.fromkeys(("kv_sharing_modes", "per_layer_config"), _OFF),
    **dict.fromkeys(("num_kv_shared_layers", "use_bidirectional_attention"), _OFF),
    # Fields that multiply activations or logits: Cohere, Granite, MiniCPM.
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier"), _ONE),
    **dict.fromkeys(("residual_multiplier", "scale_emb", "lm_head_multiplier"), _ONE),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), _ONE),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth"), _OFF),
    **dict.fromkeys(("scale_embedding", "normalize_embedding"), _OFF),
    # Fields that limit logits, scores and activations: Gemma 2, Grok, DBRX, gpt-oss.
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), _OFF),
    **dict.fromkeys(
        ("clip_qkv", "swiglu_limit", "attention_sink", "attn_temperature_tuning"), _OFF
    ),
    # Fields that ask for other norms, positions or layers: OLMo, Falcon, MPT, SmolLM3, Llama 4.
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "alibi", "parallel_attn"), _OFF),
    "qkv_bias": _OFF,
    **dict.fromkeys(("use_parallel_residual", "nope"), _OFF),
    # Fields of mixtures of experts.
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), _OFF),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), _OFF),
    **dict.fromkeys(("shared_expert_intermediate_size", "routed_scaling_factor"), _OFF),
    "scoring_func": (lambda value: value == "softmax", "absent or 'softmax'"),
    # Fields that say that weights are quantised.
    **dict.fromkeys(("compression_config", "quantization"), _OFF),
    # Fields that hold configurations of models within models.
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), _OFF),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), _OFF),
    # A field that names a file of weights, which transformers would read instead of the usual one.
    "transformers_weights": _OFF,
}


def check_switches(
    fields: Fields, read: Collection[str] = (), *, has_qk_norm: bool = False
) -> None:
    """Checks that no unsupported setting has a value that would change the logits.

    Args:
        fields: The fields of config.json.
        read: Fields that the engine supports for the model's family.
        has_qk_norm: Whether the family norms queries and keys. Then use_qk_norm must not be false.

    Raises:
        kccl.Error: A setting has such a value. The text names the file and the field.
    """
    if has_qk_norm and not fields.boolean("use_qk_norm", default=True):
        raise fields.wrong("use_qk_norm", "absent or true")
    if fields.is_null("is_causal"):
        # Fields counts null as missing, but transformers treats it as false.
        raise fields.wrong("is_causal", _SWITCHES["is_causal"][1])
    read = {*read, "use_qk_norm"} if has_qk_norm else read
    for name, (is_neutral, told) in _SWITCHES.items():
        if name not in read and name in fields and not is_neutral(fields.value(name)):
            raise fields.wrong(name, told)
