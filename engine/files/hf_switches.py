"""Fields of config.json that would change an ordinary model's logits, and the values with which
they do not. Others are refused by name.

Some of them transformers reads for other classes of models only, and passes over for Llama and
Qwen3. A file that gives them is a model of another kind under a known name.
"""

from collections.abc import Callable
from typing import Any

from ..base.fields import Fields


def _is_off(value: Any) -> bool:
    return value in (False, 0, "", [], {})


def _is_one(value: Any) -> bool:
    return not isinstance(value, bool) and value in (0, 1)


_OFF = (_is_off, "absent, 0 or false")
_ONE = (_is_one, "absent or 1")
_SWITCHES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Factors: Cohere, Granite, MiniCPM.
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier"), _ONE),
    **dict.fromkeys(("residual_multiplier", "scale_emb", "lm_head_multiplier"), _ONE),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), _ONE),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth"), _OFF),
    **dict.fromkeys(("scale_embedding", "normalize_embedding"), _OFF),
    # Limits of logits, scores and activations: Gemma 2, Grok, DBRX, gpt-oss.
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), _OFF),
    **dict.fromkeys(
        ("clip_qkv", "swiglu_limit", "attention_sink", "attn_temperature_tuning"), _OFF
    ),
    # Norms and positions of other kinds: OLMo, Falcon, MPT, SmolLM3, Llama 4.
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "alibi", "parallel_attn"), _OFF),
    **dict.fromkeys(("use_parallel_residual", "nope"), _OFF),
    # Experts.
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), _OFF),
    # Quantised weights.
    **dict.fromkeys(("compression_config", "quantization"), _OFF),
    # Models within models.
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), _OFF),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), _OFF),
    # A file that transformers would read instead.
    "transformers_weights": _OFF,
}


def check_switches(fields: Fields) -> None:
    """Refuses values that would change the logits.

    Raises:
        kccl.Error: There is one. Names the file and the field.
    """
    for name, (is_neutral, told) in _SWITCHES.items():
        if name in fields and not is_neutral(fields.value(name)):
            raise fields.wrong(name, told)
