"""Refuses GGUF files with settings that the engine does not support, but that would change a
model's logits.
"""

from collections.abc import Collection

from ..base.fields import Fields

# Type of a file that is no model -> what it is, and what the user can do.
_OTHER_TYPES = {
    "adapter": "a LoRA adapter; merge it into its base (llama-export-lora)",
    "mmproj": "a projector of images; give the model's own file",
    "vocab": "a vocabulary without weights; give the model's own file",
    "imatrix": "statistics for quantisation; give the model's own file",
}
_ZERO = (0,)
_FACTOR = (0, 1)
# Values of llama.cpp's expert_gating_func: 1 is softmax over all experts, 3 over the chosen ones.
_SOFTMAX = (0, 1, 3)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), _FACTOR),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _ZERO),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), _ZERO),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), _ZERO),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count"), _ZERO),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), _FACTOR),
    **dict.fromkeys(("leading_dense_block_count",), _ZERO),
    "expert_weights_scale": _FACTOR,
    "expert_gating_func": _SOFTMAX,
    "interleave_moe_layer_step": _FACTOR,
    **dict.fromkeys(("use_parallel_residual", "swin_norm"), (False,)),
    "attention.causal": (True,),
}


def check_type(fields: Fields) -> None:
    """Checks that a file is a model.

    Raises:
        kccl.Error: The file is something else. The text names the file and the key.
    """
    kind = fields.text("general.type", default="model")
    if kind != "model":
        told = _OTHER_TYPES.get(kind, "something else")
        raise fields.wrong("general.type", f"'model': the file is {told}")


def check_switches(fields: Fields, family: str, read: Collection[str] = ()) -> None:
    """Checks that no unsupported setting has a value that would change the logits.

    Args:
        fields: The file's metadata.
        family: The architecture.
        read: Keys, without the architecture's name, that the engine supports for it.

    Raises:
        kccl.Error: A setting has such a value. The text names the file and the key.
    """
    for key, neutral in _NEUTRAL.items():
        name = f"{family}.{key}"
        if (
            key not in read
            and name in fields
            and not any(
                # Compares types too, because True == 1 in Python.
                fields.value(name) == each and _is_bool(fields.value(name)) is _is_bool(each)
                for each in neutral
            )
        ):
            raise fields.wrong(name, " or ".join(map(str, ("absent", *neutral))))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)
