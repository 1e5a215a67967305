"""Reads a model's configuration from Hugging Face's config.json.

It reads every switch that changes the logits. Values that the engine does not support are refused.
"""

from pathlib import Path
from typing import Any

import kccl

from ..base.fields import Fields, read_json
from ..formats.mxfp4 import MXFP4
from ..model.config import FAMILIES, ModelConfig, lanes_for
from .hf_experts import MIXTURES, READ, experts
from .hf_layers import biases, windows
from .hf_rope import read_rope
from .hf_switches import check_switches
from .schemes import FIELD as QUANTIZATION

# The first table maps model_type to ModelConfig.family. The second maps a family to its class in
# the field `architectures`.
_FAMILY_OF = {"laneformer": "laneformer", "laneformer_tp": "laneformer"}
_FAMILY_OF |= {family: family for family in ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)}
ARCHITECTURE_OF = {
    "laneformer": "LaneformerForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# Field of ModelConfig -> its name in the file. If there are several, the file may use any of them.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),  # Qwen3's experts have another name: _shape().
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "context": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "window": ("sliding_window",),
    "window_layers": ("swa_layers", "sliding_window_n_layers"),
    "is_tied": ("tie_word_embeddings",),
    "delay": ("broadcast_delay",),
    "early_comm": ("use_early_comm",),
    "early_messages": ("use_early_messages",),
    "attention_comm": ("use_attention_comm",),
    "mlp_comm": ("use_mlp_comm",),
    "lm_head": ("lm_head_type",),
}
# Field -> the value that it must have if it is there, and the words for it in an error.
_ONLY: dict[str, tuple[object, str]] = {
    "hidden_act": ("silu", '"silu"'),
    # These two fields belong to Laneformers. The engine averages the lanes' residuals after the
    # norm, and all lanes share the norm's weights.
    "pre_norm_lane_agg": (False, "false, because the engine averages lanes after the norm"),
    "replicated_rmsn_scale": (True, "true, because the lanes share their norms' weights"),
}


def read_config(path: Path) -> ModelConfig:
    """Reads config.json.

    Raises:
        kccl.Error: The engine does not support the configuration. The text names the file and the
            field.
    """
    fields = Fields(path, read_json(path))
    family = _family(fields)
    for name, (wanted, text) in _ONLY.items():
        # In transformers "swish" is another name of SiLU.
        if name == "hidden_act" and fields.value(name) == "swish":
            continue
        if name in fields and fields.value(name) != wanted:
            raise fields.wrong(name, text)
    if family == "laneformer" and QUANTIZATION in fields:
        raise fields.wrong(QUANTIZATION, "absent in a Laneformer")
    shape: dict[str, Any] = _shape(fields, family)
    own = _laneformer(fields) if family == "laneformer" else _ordinary(fields, family, shape)
    try:
        return ModelConfig(**shape, **own, names=_names(fields))
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{path}: {error}") from error


def _family(fields: Fields) -> str:
    architectures = fields.value("architectures") or []
    by_class = {name: family for family, name in ARCHITECTURE_OF.items()}
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) and name in by_class for name in architectures
    ):
        raise fields.wrong("architectures", f"one of {', '.join(by_class)}")
    families = {by_class[name] for name in architectures}
    if "model_type" in fields:
        model_type = fields.text("model_type")
        if model_type not in _FAMILY_OF:
            raise fields.wrong("model_type", f"one of {', '.join(_FAMILY_OF)}")
        families.add(_FAMILY_OF[model_type])
    if len(families) != 1:
        raise kccl.Error(
            f"{fields.path}: fields model_type and architectures name "
            f"{' and '.join(sorted(families)) or 'no model'}, must name one of "
            f"{', '.join(FAMILIES)}"
        )
    return families.pop()


def _names(fields: Fields) -> dict[str, str]:
    """Returns this file's names for the fields of ModelConfig."""
    names = {own: fields.name_of(*theirs) for own, theirs in _NAMES.items()}
    for own in ("attention_comm", "mlp_comm"):
        names[own] = fields.name_of(names[own], "use_comm")
    if "moe_intermediate_size" in fields:
        names["ffn"] = "moe_intermediate_size"
    if "head_dim" not in fields:
        names["head_dim"] = f"{names['hidden']} / {names['num_heads']}"
    return names


def _shape(fields: Fields, family: str) -> dict[str, Any]:
    """Returns the fields of ModelConfig that all families have."""
    hidden = fields.integer(*_NAMES["hidden"])
    num_heads = fields.integer(*_NAMES["num_heads"], least=1)
    if family == "qwen3":
        # The field must be there, because transformers' default differs between its versions.
        head_dim = fields.integer("head_dim")
    else:
        head_dim = fields.integer("head_dim", default=hidden // num_heads)
    context = fields.integer(*_NAMES["context"])
    norm_eps = 1e-5 if family in ("laneformer", "mixtral", "gpt_oss") else 1e-6
    of_ffn = ("moe_intermediate_size",) if family == "qwen3_moe" else _NAMES["ffn"]
    return {
        "family": family,
        "num_layers": fields.integer(*_NAMES["num_layers"]),
        "hidden": hidden,
        "ffn": fields.integer(*of_ffn, least=1),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer(*_NAMES["num_kv_heads"], default=num_heads, least=1),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "context": context,
        "norm_eps": fields.number(*_NAMES["norm_eps"], default=norm_eps),
        "is_tied": fields.boolean(*_NAMES["is_tied"], default=False),
        "rope": read_rope(fields, family, context, head_dim),
    }


def _laneformer(fields: Fields) -> dict[str, Any]:
    window = fields.integer(*_NAMES["window"], default=0)
    comm = fields.boolean("use_comm", default=True)

    def switch(own: str, default: bool) -> bool:
        return fields.boolean(*_NAMES[own], default=default)

    return {
        "num_lanes": fields.integer("num_lanes"),
        "window": window,
        "window_layers": _window_layers(fields) if window else 0,
        "biases": biases(fields, "laneformer"),
        "delay": fields.integer(*_NAMES["delay"], default=2),
        "early_comm": switch("early_comm", False),
        "early_messages": switch("early_messages", True),
        "attention_comm": switch("attention_comm", comm),
        "mlp_comm": switch("mlp_comm", comm),
        "lm_head": fields.text(*_NAMES["lm_head"], default="replicate"),
        "message_dtype": fields.text("message_dtype", default="bfloat16"),
    }


def _window_layers(fields: Fields) -> int | tuple[int, ...]:
    """Returns which layers have the window: the number of first layers, or a list of layers."""
    names = _NAMES["window_layers"]
    layers = fields.value(*names)
    return tuple(layers) if isinstance(layers, list) else fields.integer(*names)


def _ordinary(fields: Fields, family: str, shape: dict[str, Any]) -> dict[str, Any]:
    has_qk_norm = family in ("qwen3", "qwen3_moe")
    check_switches(fields, READ if family in MIXTURES else (), has_qk_norm=has_qk_norm)
    block = MXFP4.block if family == "gpt_oss" else 1
    window, window_layers = windows(fields, family, shape["num_layers"], shape["context"])
    return {
        "num_lanes": lanes_for(shape["num_heads"], shape["num_kv_heads"], shape["ffn"], block),
        "has_qk_norm": has_qk_norm,
        "window": window,
        "window_layers": window_layers,
        "biases": biases(fields, family),
        **experts(fields, family),
    }
