"""Keys of a GGUF file that would change an ordinary model's logits, and the values with which they
do not. Others are refused by name.
"""

from ..base.fields import Fields

# Kinds of files that are no model, and what to do with them.
_OTHER_TYPES = {
    "adapter": "a LoRA adapter; merge it into its base (llama-export-lora)",
    "mmproj": "a projector of images; give the model's own file",
    "vocab": "a vocabulary without weights; give the model's own file",
    "imatrix": "statistics for quantisation; give the model's own file",
}
_ZERO = (0,)
_FACTOR = (0, 1)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), _FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _ZERO),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), _ZERO),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), _ZERO),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count"), _ZERO),
    **dict.fromkeys(("use_parallel_residual", "swin_norm"), (False,)),
    "attention.causal": (True,),
}


def check_type(fields: Fields) -> None:
    """Refuses a file that is no model.

    Raises:
        kccl.Error: It is something else. Names the file and the key.
    """
    kind = fields.text("general.type", default="model")
    if kind != "model":
        told = _OTHER_TYPES.get(kind, "something else")
        raise fields.wrong("general.type", f"'model': the file is {told}")


def check_switches(fields: Fields, family: str) -> None:
    """Refuses values that would change the logits.

    Raises:
        kccl.Error: There is one. Names the file and the key.
    """
    for key, neutral in _NEUTRAL.items():
        name = f"{family}.{key}"
        if name in fields and not any(
            # True is 1 in Python.
            fields.value(name) == each and _is_bool(fields.value(name)) is _is_bool(each)
            for each in neutral
        ):
            raise fields.wrong(name, " or ".join(map(str, ("absent", *neutral))))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)
