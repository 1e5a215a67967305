"""Reads RoPE from Hugging Face's config.json. Older files have rope_theta and rope_scaling, newer
ones have rope_parameters with both. The kinds of scaling are those of transformers.
"""

import math
from typing import Any

import kccl

from ..base.fields import Fields
from ..model.rope import MOST_POSITIONS, LinearScaling, Llama3Scaling, Rope, Scaling
from ..model.rope_scaling import DynamicScaling, LongRopeScaling, YarnScaling, yarn_attention_factor

_PARAMETERS = ("rope_parameters", "rope_scaling")
# Family -> the base of RoPE's frequencies if the file has no rope_theta. In other families it is
# 10000.
_THETA = {"mixtral": 1e6, "gpt_oss": 150_000.0}
_ORIGINAL = "original_max_position_embeddings"
# The fields of all kinds of scaling. Like transformers, each kind ignores the others' fields.
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "factor"}
_KNOWN |= {_ORIGINAL, "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"}
_KNOWN |= {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
# Fields of models that the engine does not support: they rotate only a share of the pairs
# (_SHARES), or rotate some pairs or layers differently (_OTHERS).
_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_pct")
_OTHERS = (
    *("rotary_dim", "rope_local_base_freq", "local_rope_theta", "global_rope_theta"),
    *("rope_ratio", "mrope_section", "no_rope_layers", "no_rope_layer_interval", "use_mrope"),
)


def read_rope(fields: Fields, family: str, context: int, head_dim: int) -> Rope:
    """Returns the RoPE of a model.

    Args:
        fields: The fields of config.json.
        family: The model's ModelConfig.family.
        context: The field max_position_embeddings, the model's context length.
        head_dim: The number of elements of a head.

    Raises:
        kccl.Error: The engine does not support this RoPE. The text names the file, the field and
            its value.
    """
    if not 1 <= context <= MOST_POSITIONS:
        raise kccl.Error(
            f"{fields.path}: max_position_embeddings is {context}, must be an integer from 1 to "
            f"{MOST_POSITIONS}"
        )
    values = fields.value(*_PARAMETERS)
    if values is None:
        if family == "gpt_oss":
            # Without the field transformers would use the scaling that its class has by default.
            # The file does not show whether the model has this scaling.
            raise kccl.Error(f"{fields.path}: field {' or '.join(_PARAMETERS)} is missing")
        values = {}
    if not isinstance(values, dict):
        raise fields.wrong(_PARAMETERS, "an object")
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.wrong(_PARAMETERS, "the same for all layers")
    within = Fields(fields.path, values)
    for holder in (fields, within):
        for name in _SHARES:
            if name in holder and holder.value(name) != 1:
                raise holder.wrong(name, "1, because the engine turns all pairs")
        for name in _OTHERS:
            if holder.value(name):
                raise holder.wrong(name, "absent, because the engine turns all layers alike")
    for name in sorted(values.keys() - _KNOWN):
        if name in within:
            raise within.wrong(name, "absent, because the engine does not know it")
    is_interleaved = fields.boolean("rope_interleaved", default=family == "laneformer")
    if is_interleaved and family != "laneformer":
        raise fields.wrong("rope_interleaved", f"false for the family {family}, as in transformers")
    theta = fields.positive("rope_theta", default=_THETA.get(family, 10_000.0))
    try:
        scaling, attention_factor = _scaling(fields, within, context, head_dim)
        return Rope(
            theta=within.positive("rope_theta", default=theta),
            is_interleaved=is_interleaved,
            scaling=scaling,
            attention_factor=attention_factor,
        )
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{fields.path}: {error}") from error


def _scaling(
    fields: Fields, within: Fields, context: int, head_dim: int
) -> tuple[Scaling | None, float]:
    """Returns the scaling, which may be None, and the factor by which cosines and sines are
    multiplied.
    """
    kind = within.text("rope_type", "type", default="default")

    def original(least: int = 1) -> int:
        # The field may stand at the file's top level, in the RoPE parameters, or both. The one at
        # the top level counts.
        holder = fields if _ORIGINAL in fields else within
        number = holder.integer(_ORIGINAL, default=context, least=least)
        if number > MOST_POSITIONS:
            raise holder.wrong(_ORIGINAL, f"at most {MOST_POSITIONS}")
        return number

    match kind:
        case "default":
            return None, 1.0
        case "linear":
            return LinearScaling(within.positive("factor")), 1.0
        case "dynamic":
            return DynamicScaling(within.positive("factor"), context), 1.0
        case "llama3":
            return Llama3Scaling(
                factor=within.positive("factor"),
                low_freq_factor=within.positive("low_freq_factor"),
                high_freq_factor=within.positive("high_freq_factor"),
                original_context=original(),
            ), 1.0
        case "yarn":
            return _yarn(within, context, original())
        case "longrope":
            return _longrope(within, context, original(least=2), head_dim)
    kinds = "default, linear, dynamic, llama3, yarn, longrope"
    raise within.wrong(("rope_type", "type"), f"one of {kinds}")


def _yarn(within: Fields, context: int, original: int) -> tuple[Scaling, float]:
    ratio = context / original
    factor = within.positive("factor", default=None if ratio == 1 else ratio)

    def at_least_0(name: str, default: float) -> float:
        """Returns a field's number. If it is missing or 0, returns the default."""
        if within.number(name, default=0) < 0:
            raise within.wrong(name, "at least 0")
        return within.number(name, default=0) or default

    scaling = YarnScaling(
        factor,
        original,
        beta_fast=at_least_0("beta_fast", 32),
        beta_slow=at_least_0("beta_slow", 1),
        truncate=within.boolean("truncate", default=True),
    )
    mscales = [at_least_0(name, 0) for name in ("mscale", "mscale_all_dim")]
    usual = yarn_attention_factor(factor)
    if all(mscales):
        mscale, over_all = (yarn_attention_factor(factor, each) for each in mscales)
        usual = mscale / over_all
    return scaling, within.positive("attention_factor", default=usual)


def _longrope(within: Fields, context: int, original: int, head_dim: int) -> tuple[Scaling, float]:
    short, long = (
        _factors(within, name, head_dim // 2) for name in ("short_factor", "long_factor")
    )
    factor = within.positive("factor", default=context / original)
    usual = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    attention_factor = within.positive("attention_factor", default=usual)
    return LongRopeScaling(short, long, original), attention_factor


def _factors(within: Fields, name: str, num: int) -> tuple[float, ...]:
    values: Any = within.value(name)
    if not isinstance(values, list) or len(values) != num:
        raise within.wrong(name, f"a list of {num} numbers, one for each pair of a head")
    holder = Fields(within.path, {f"{name}[{i}]": value for i, value in enumerate(values)})
    return tuple(holder.positive(f"{name}[{i}]") for i in range(num))
