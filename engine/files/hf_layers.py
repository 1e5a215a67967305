"""Reads from config.json which layers have a window, and which products biases, as transformers
does.
"""

from ..base.fields import Fields
from ..model.ops import ATTENTION, IN_MIXTURE, MLP, products_of_module

_SLIDING, _FULL = "sliding_attention", "full_attention"
# What transformers' classes for Qwen and Mistral use if sliding_window or max_window_layers is
# missing. If sliding_window is null, there is no window.
_DEFAULT_WINDOW, _DEFAULT_FIRST = 4096, 28


def windows(
    fields: Fields, family: str, num_layers: int, context: int
) -> tuple[int, tuple[int, ...]]:
    """Returns the window in positions, and the layers that have it. Returns (0, ()) if no layer has
    one.

    Args:
        fields: The fields of config.json.
        family: The model's ModelConfig.family.
        num_layers: The number of the model's layers.
        context: The field max_position_embeddings, the model's context length.

    Raises:
        kccl.Error: A field is wrong; the text names it.
    """
    if family in ("qwen2", "qwen3"):
        is_used = fields.boolean("use_sliding_window", default=False)
        window = _window(fields) if is_used else 0
        layers = _layers_of_qwen(fields, num_layers, window)
    elif family == "gpt_oss":
        window = _window(fields, default=0)
        kinds = _kinds(fields, num_layers)
        # If layer_types is missing, every other layer has the window, beginning with the first.
        layers = tuple(range(0, num_layers, 2)) if kinds is None else _sliding(kinds)
        if layers and not window:
            raise fields.wrong("sliding_window", f"given, because layers are {_SLIDING!r}")
    else:
        window = _window_of_all(fields, family, context)
        layers = tuple(range(num_layers)) if window else ()
        # In transformers' classes of these families sliding_window decides about the mask, and
        # layer_types about the KV cache. So the engine requires that they agree.
        if (kinds := _kinds(fields, num_layers)) is not None and _sliding(kinds) != layers:
            wanted = _SLIDING if window else _FULL
            raise fields.wrong("layer_types", f"{num_layers} times {wanted!r}, as the window says")
    return (window, layers) if layers else (0, ())


def biases(fields: Fields, family: str) -> tuple[str, ...]:
    """Returns the kinds of ops whose products have biases: ModelConfig.biases.

    Raises:
        kccl.Error: A field is wrong, or says that there are biases which the family does not have.
    """
    has_attention = fields.boolean("attention_bias", default=family == "gpt_oss")
    has_mlp = fields.boolean("mlp_bias", default=False)
    if has_mlp and family != "llama":
        raise fields.wrong("mlp_bias", f"false in a model of the family {family}")
    if family == "qwen2":
        # transformers' class of this family has biases of queries, keys and values, whatever the
        # file says.
        return ("qkv",)
    if family == "gpt_oss":
        of_experts = products_of_module(MLP, IN_MIXTURE)
        return products_of_module(ATTENTION) * has_attention + of_experts
    if has_attention and family not in ("llama", "qwen3", "qwen3_moe"):
        raise fields.wrong("attention_bias", f"false in a model of the family {family}")
    return products_of_module(ATTENTION) * has_attention + products_of_module(MLP) * has_mlp


def _window(fields: Fields, default: int = _DEFAULT_WINDOW) -> int:
    """Returns the window of the layers that have one, in positions. Returns 0 if there is none."""
    if "sliding_window" in fields:
        return fields.integer("sliding_window", least=1)
    return 0 if fields.is_null("sliding_window") else default


def _window_of_all(fields: Fields, family: str, context: int) -> int:
    """Returns the window of a family in which either all layers have a window or none. Returns 0 if
    there is none.
    """
    if family == "mistral":
        return _window(fields)
    if family == "mixtral":
        return _window(fields, default=0)
    if family == "qwen3_moe":
        # max_window_layers has no effect in this family.
        return _window(fields) if fields.boolean("use_sliding_window", default=False) else 0
    # transformers' Llama does not mask by a window, but its KV cache drops keys that are older. So
    # its logits would depend on how a prompt is cut into chunks.
    if "sliding_window" in fields and fields.integer("sliding_window") < context:
        raise fields.wrong(
            "sliding_window",
            f"absent or at least the context, {context}, in a model of the family {family}",
        )
    return 0


def _layers_of_qwen(fields: Fields, num_layers: int, window: int) -> tuple[int, ...]:
    kinds = _kinds(fields, num_layers)
    if kinds is None:
        first = fields.integer("max_window_layers", default=_DEFAULT_FIRST) if window else 0
        return tuple(range(max(first, 0), num_layers)) if window else ()
    if _SLIDING in kinds and not window:
        name = "sliding_window" if fields.value("use_sliding_window") else "use_sliding_window"
        raise fields.wrong("layer_types", f"all {_FULL!r}, because {name} gives no window")
    return _sliding(kinds)


def _kinds(fields: Fields, num_layers: int) -> list[str] | None:
    kinds = fields.value("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} entries")
    if any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise fields.wrong("layer_types", f"a list of {_SLIDING!r} and {_FULL!r}")
    return kinds


def _sliding(kinds: list[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
