"""A model's configuration from Hugging Face's config.json.

Every switch that changes the logits is read, and a value that the engine cannot honour is refused.
"""

from pathlib import Path
from typing import Any

import kccl

from .config import FAMILIES, ModelConfig, lanes_for
from .fields import Fields, read_json
from .hf_switches import check_switches
from .rope import LinearScaling, Llama3Scaling, Rope, Scaling

# model_type -> family, and the family's class in `architectures`.
_FAMILY_OF = {"laneformer": "laneformer", "laneformer_tp": "laneformer"}
_FAMILY_OF |= {"llama": "llama", "qwen3": "qwen3"}
_ARCHITECTURE_OF = {
    "laneformer": "LaneformerForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields of ModelConfig, and what the file calls them. Of several names any may be given.
_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
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
# Fields that must have this value if they are given.
_ONLY: dict[str, tuple[object, str]] = {
    "hidden_act": ("silu", '"silu"'),
    "attention_bias": (False, "false, because the engine has no biases"),
    "mlp_bias": (False, "false, because the engine has no biases"),
    "partial_rotary_factor": (1.0, "1"),
    # Laneformer's: the mean over the lanes follows the norm, and one norm serves all lanes.
    "pre_norm_lane_agg": (False, "false, because the engine averages lanes after the norm"),
    "replicated_rmsn_scale": (True, "true, because the lanes share their norms' weights"),
}


def read_config(path: Path) -> ModelConfig:
    """Reads config.json.

    Raises:
        kccl.Error: It is no configuration that the engine knows. Names the file and the field.
    """
    fields = Fields(path, read_json(path))
    family = _family(fields)
    for name, (wanted, text) in _ONLY.items():
        if name in fields and fields.value(name) != wanted:
            raise fields.wrong(name, text)
    if "quantization_config" in fields:
        raise fields.wrong("quantization_config", "absent: of quantised files only GGUF is read")
    shape: dict[str, Any] = _shape(fields, family)
    own = _laneformer(fields) if family == "laneformer" else _ordinary(fields, family, shape)
    try:
        return ModelConfig(**shape, **own, names=_names(fields))
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{path}: {error}") from error


def _family(fields: Fields) -> str:
    architectures = fields.value("architectures") or []
    by_class = {name: family for family, name in _ARCHITECTURE_OF.items()}
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
    """What this file calls the fields of ModelConfig."""
    names = {own: fields.name_of(*theirs) for own, theirs in _NAMES.items()}
    for own in ("attention_comm", "mlp_comm"):
        names[own] = fields.name_of(names[own], "use_comm")
    if "head_dim" not in fields:
        names["head_dim"] = f"{names['hidden']} / {names['num_heads']}"
    return names


def _shape(fields: Fields, family: str) -> dict[str, Any]:
    """What all families have."""
    hidden = fields.integer(*_NAMES["hidden"])
    num_heads = fields.integer(*_NAMES["num_heads"], least=1)
    if family == "qwen3":
        # Why no default: transformers' own depends on its version.
        head_dim = fields.integer("head_dim")
    else:
        head_dim = fields.integer("head_dim", default=hidden // num_heads)
    norm_eps = 1e-5 if family == "laneformer" else 1e-6
    return {
        "family": family,
        "num_layers": fields.integer(*_NAMES["num_layers"]),
        "hidden": hidden,
        "ffn": fields.integer(*_NAMES["ffn"], least=1),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer(*_NAMES["num_kv_heads"], default=num_heads, least=1),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "context": fields.integer(*_NAMES["context"]),
        "norm_eps": fields.number(*_NAMES["norm_eps"], default=norm_eps),
        "is_tied": fields.boolean(*_NAMES["is_tied"], default=False),
        "rope": _rope(fields, is_interleaved=family == "laneformer"),
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
        "delay": fields.integer(*_NAMES["delay"], default=2),
        "early_comm": switch("early_comm", False),
        "early_messages": switch("early_messages", True),
        "attention_comm": switch("attention_comm", comm),
        "mlp_comm": switch("mlp_comm", comm),
        "lm_head": fields.text(*_NAMES["lm_head"], default="replicate"),
        "message_dtype": fields.text("message_dtype", default="bfloat16"),
    }


def _window_layers(fields: Fields) -> int:
    """How many layers have the window: a number, or a list of layers."""
    names = _NAMES["window_layers"]
    layers = fields.value(*names)
    if isinstance(layers, list):
        if layers != list(range(len(layers))):
            raise fields.wrong(names, "the layers from 0 to some layer, in this order")
        return len(layers)
    return fields.integer(*names)


def _ordinary(fields: Fields, family: str, shape: dict[str, Any]) -> dict[str, Any]:
    check_switches(fields)
    window, window_layers = 0, 0
    if family == "qwen3":
        window, window_layers = _qwen3_window(fields, shape["num_layers"])
    return {
        "num_lanes": lanes_for(shape["num_heads"], shape["num_kv_heads"], shape["ffn"]),
        "has_qk_norm": family == "qwen3",
        "window": window,
        "window_layers": window_layers,
    }


def _qwen3_window(fields: Fields, num_layers: int) -> tuple[int, int]:
    """The window, and the number of layers that have it."""
    if not fields.boolean("use_sliding_window", default=False) or "sliding_window" not in fields:
        return 0, 0
    kinds = fields.value("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers")
        num_sliding = max(num_layers - max(first, 0), 0)
        if 0 < num_sliding < num_layers:
            raise fields.wrong("max_window_layers", "0, because layers with a window come first")
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.wrong("layer_types", f"a list of {num_layers} entries")
        num_sliding = kinds.count("sliding_attention")
        if kinds[:num_sliding] != ["sliding_attention"] * num_sliding:
            raise fields.wrong("layer_types", "such that the layers with a window come first")
    window = fields.integer(*_NAMES["window"], least=1)
    return (window, num_sliding) if num_sliding else (0, 0)


def _rope(fields: Fields, *, is_interleaved: bool) -> Rope:
    """RoPE in either spelling: rope_theta and rope_scaling, or rope_parameters with both."""
    names = ("rope_parameters", "rope_scaling")
    values = fields.value(*names)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise fields.wrong(names, "an object")
    within = Fields(fields.path, {**values, "rope_theta": values.get("rope_theta")})
    theta = within.positive("rope_theta", default=fields.positive("rope_theta", default=10_000.0))
    if "partial_rotary_factor" in within and within.value("partial_rotary_factor") != 1.0:
        raise within.wrong("partial_rotary_factor", "1")
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.wrong(names, "the same for all layers")
    try:
        return Rope(
            theta=theta,
            is_interleaved=fields.boolean("rope_interleaved", default=is_interleaved),
            scaling=_scaling(within),
        )
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{fields.path}: {error}") from error


def _scaling(fields: Fields) -> Scaling | None:
    kind = fields.text("rope_type", "type", default="default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(fields.positive("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=fields.positive("factor"),
            low_freq_factor=fields.positive("low_freq_factor"),
            high_freq_factor=fields.positive("high_freq_factor"),
            original_context=fields.integer("original_max_position_embeddings", least=1),
        )
    raise fields.wrong(("rope_type", "type"), "one of default, linear, llama3")
