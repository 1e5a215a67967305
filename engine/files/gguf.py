"""Models in GGUF files: the configuration from the metadata, quantised tensors in BF16."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.fields import Fields
from ..model.config import FAMILIES, ModelConfig, lanes_for
from ..model.ops import BIASES
from ..text.tokenizer import Tokenizer
from .gguf_parts import GgufParts
from .gguf_rope import ROPE_TABLES, read_rope
from .gguf_switches import check_switches, check_type
from .source import Source, layer_names

# Mistral's files have the architecture llama, too.
_FAMILIES = ("llama", "qwen2", "qwen3")
# Fields of ModelConfig, and the keys of the metadata behind the family's name.
_KEYS = {
    "num_layers": "block_count",
    "hidden": "embedding_length",
    "ffn": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "context": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "attention_scale": "attention.scale",
}
WHOLE_NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
}
LAYER_NAMES = {
    "wq": "blk.{}.attn_q.weight",
    "wk": "blk.{}.attn_k.weight",
    "wv": "blk.{}.attn_v.weight",
    "wo": "blk.{}.attn_output.weight",
    "bq": "blk.{}.attn_q.bias",
    "bk": "blk.{}.attn_k.bias",
    "bv": "blk.{}.attn_v.bias",
    "bo": "blk.{}.attn_output.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "w1": "blk.{}.ffn_gate.weight",
    "w3": "blk.{}.ffn_up.weight",
    "w2": "blk.{}.ffn_down.weight",
    "b1": "blk.{}.ffn_gate.bias",
    "b3": "blk.{}.ffn_up.bias",
    "b2": "blk.{}.ffn_down.bias",
    "attention_norm": "blk.{}.attn_norm.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
}


class GgufSource(Source):
    """A GGUF file, or several that are parts of one model."""

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            kccl.Error: It is damaged, or holds a model that the engine does not know.
        """
        self._file = GgufParts(path)
        self.path = self._file.path
        try:
            tensors = self._file.tensors
            self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self.dtypes = {name: tensor.quantisation for name, tensor in tensors.items()}
            self.config = self._read_config()
            self.names = layer_names(self.config, WHOLE_NAMES, LAYER_NAMES)
        except BaseException:
            self.close()
            raise
        from ..text.tokenizer_gguf import has_tokenizer

        self.has_tokenizer = has_tokenizer(self._file.metadata)
        self.ignored = ROPE_TABLES & self.shapes.keys()

    def _read_config(self) -> ModelConfig:
        fields = Fields(self.path, self._file.metadata)
        check_type(fields)
        family = fields.text("general.architecture")
        if family not in _FAMILIES:
            raise fields.wrong("general.architecture", f"one of {', '.join(_FAMILIES)}")
        check_switches(fields, family)
        context = fields.integer(f"{family}.{_KEYS['context']}")
        # llama.cpp ignores it in these architectures, transformers does not.
        window = f"{family}.attention.sliding_window"
        if 0 < fields.integer(window, default=0) < context:
            raise fields.wrong(
                window,
                f"absent or at least the context, {context}: the file does not say which layers "
                "have the window; a folder in Hugging Face's layout does",
            )
        if WHOLE_NAMES["embedding"] not in self.shapes:
            raise kccl.Error(f"{self.path}: tensor {WHOLE_NAMES['embedding']} is missing")
        names = {own: f"{family}.{key}" for own, key in _KEYS.items()}
        hidden = fields.integer(names["hidden"])
        num_heads = self._of_all_layers(fields, names["num_heads"])
        num_kv_heads = self._of_all_layers(fields, names["num_kv_heads"], default=num_heads)
        ffn = self._of_all_layers(fields, names["ffn"])
        head_dim = fields.integer(names["head_dim"], default=hidden // num_heads)
        if names["head_dim"] not in fields:
            names["head_dim"] = f"{names['hidden']} / {names['num_heads']}"
        for name in ("attention.value_length", "rope.dimension_count"):
            if fields.integer(f"{family}.{name}", default=head_dim) != head_dim:
                raise fields.wrong(f"{family}.{name}", f"the head's size, {head_dim}")
        context = fields.integer(names["context"])
        try:
            return ModelConfig(
                family=FAMILIES[FAMILIES.index(family)],
                num_layers=fields.integer(names["num_layers"]),
                num_lanes=lanes_for(num_heads, num_kv_heads, ffn),
                hidden=hidden,
                ffn=ffn,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                vocab_size=fields.integer(
                    names["vocab_size"], default=self.shapes[WHOLE_NAMES["embedding"]][0]
                ),
                context=context,
                norm_eps=fields.number(names["norm_eps"]),
                rope=read_rope(self._file, fields, family, context, head_dim),
                attention_scale=fields.number(names["attention_scale"], default=0.0),
                is_tied=WHOLE_NAMES["head"] not in self.shapes,
                has_qk_norm=family == "qwen3",
                # If one layer has them, all must have them: a missing one is named.
                biases=tuple(
                    kind
                    for kind in BIASES
                    if self._holds(BIASES[kind]) or (kind == "qkv" and family == "qwen2")
                ),
                names=names,
            )
        except kccl.InvalidArgument as error:
            raise kccl.Error(f"{self.path}: {error}") from error

    def _holds(self, names: tuple[str, ...]) -> bool:
        """Whether the file has one of these tensors of any layer."""
        forms = [LAYER_NAMES[name].partition("{}") for name in names]
        return any(
            held.startswith(begin) and held.endswith(end)
            for held in self.shapes
            for begin, _, end in forms
        )

    def _of_all_layers(self, fields: Fields, name: str, default: int | None = None) -> int:
        """A field, at least 1, that some files give once for each layer."""
        value = fields.value(name)
        if not isinstance(value, np.ndarray):
            return fields.integer(name, default=default, least=1)
        if value.dtype.kind not in "iu" or value.size == 0 or (value != value[0]).any():
            raise fields.wrong(name, "the same integer for all layers")
        if value[0] < 1:
            raise fields.wrong(name, "at least 1")
        return int(value[0])

    def file_of(self, name: str) -> Path:
        return self._file.file_of(name)

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self._file.read(name, start, stop)

    def tokenizer(self) -> Tokenizer:
        from ..text.tokenizer_gguf import from_gguf

        return from_gguf(self.path, self._file.metadata)

    def end_ids(self) -> tuple[int, ...]:
        from ..text.tokenizer_gguf import named_ends

        return named_ends(self.path, self._file.metadata, self.config.vocab_size)

    def close(self) -> None:
        self._file.close()
