"""Reads what config.json says of a mixture of experts."""

from typing import Any

from ..base.fields import Fields
from ..model.experts import MOST_CHOSEN, MOST_EXPERTS, SWISH, Experts

_NUM = ("num_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")
"""The families whose layers have experts."""
READ = frozenset({*_NUM, *_CHOSEN, "swiglu_limit"})
"""The fields of config.json that only families of MIXTURES may have."""


def experts(fields: Fields, family: str) -> dict[str, Any]:
    """Returns the fields of ModelConfig that only mixtures have. Returns {} for other families.

    Raises:
        kccl.Error: A field is wrong, or asks for layers that the engine does not support. The text
            names the field.
    """
    if family not in MIXTURES:
        return {}
    num = _at_most(fields, _NUM, MOST_EXPERTS)
    chosen = _at_most(fields, _CHOSEN, min(MOST_CHOSEN, num))
    if family == "qwen3_moe":
        _refuse_other_layers(fields)
        is_normalised = fields.boolean("norm_topk_prob", default=False)
        return {"experts": Experts(num=num, chosen=chosen, is_normalised=is_normalised)}
    if family == "mixtral":
        return {"experts": Experts(num=num, chosen=chosen)}
    if fields.number("swiglu_alpha", default=SWISH) != SWISH:
        raise fields.wrong("swiglu_alpha", f"{SWISH}")
    return {
        "experts": Experts(num=num, chosen=chosen),
        "swiglu_limit": fields.positive("swiglu_limit", default=7.0),
        "has_sinks": True,
    }


def _at_most(fields: Fields, names: tuple[str, ...], most: int) -> int:
    value = fields.integer(*names, least=1)
    if value > most:
        raise fields.wrong(names, f"at most {most}")
    return value


def _refuse_other_layers(fields: Fields) -> None:
    """Raises kccl.Error if some layers have experts and others a single feed-forward block."""
    if fields.integer("decoder_sparse_step", default=1) != 1:
        raise fields.wrong("decoder_sparse_step", "1: every layer has experts")
    if fields.value("mlp_only_layers"):
        raise fields.wrong("mlp_only_layers", "empty: every layer has experts")
