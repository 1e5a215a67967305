"""Reads models in GGUF files: the configuration from the metadata, and tensors as they are
stored.
"""

from pathlib import Path
from typing import Any

import numpy as np

import kccl

from ..base.fields import Fields
from ..formats.base import Stored
from ..formats.blocks32 import Blocks32
from ..formats.blocks256 import Blocks256
from ..formats.mxfp4 import MXFP4
from ..formats.table import OF_GGUF
from ..model.config import ModelConfig, lanes_for
from ..model.ops import BIASES, KINDS
from ..text.tokenizer import Tokenizer
from .blocks import Blocks
from .defaults import Defaults, defaults_of_gguf
from .gguf_experts import MIXTURES, OF_EXPERT, experts, parts_of, read_part
from .gguf_parts import GgufParts
from .gguf_rope import ROPE_TABLES, read_rope
from .gguf_switches import check_switches, check_type
from .source import Source, layer_names

# GGUF's architecture -> ModelConfig.family. In Mistral's files the architecture is "llama", too.
_FAMILIES: dict[str, Any] = {family: family for family in ("llama", "qwen2", "qwen3")} | MIXTURES
# Field of ModelConfig -> its key in the metadata, without the architecture's name in front.
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
    "sinks": "blk.{}.attn_sinks.weight",
    "router": "blk.{}.ffn_gate_inp.weight",
    "router_bias": "blk.{}.ffn_gate_inp.bias",
    "experts.w1": f"blk.{{}}.ffn_gate_exps.weight{OF_EXPERT}{{}}",
    "experts.w3": f"blk.{{}}.ffn_up_exps.weight{OF_EXPERT}{{}}",
    "experts.w2": f"blk.{{}}.ffn_down_exps.weight{OF_EXPERT}{{}}",
    "experts.b1": f"blk.{{}}.ffn_gate_exps.bias{OF_EXPERT}{{}}",
    "experts.b3": f"blk.{{}}.ffn_up_exps.bias{OF_EXPERT}{{}}",
    "experts.b2": f"blk.{{}}.ffn_down_exps.bias{OF_EXPERT}{{}}",
}
_GPT_OSS_LAYER = LAYER_NAMES | {"ffn_norm": "blk.{}.post_attention_norm.weight"}


class GgufSource(Source):
    """A GGUF file, or several that are parts of one model."""

    def __init__(self, path: Path) -> None:
        """Reads the metadata, and where the tensors lie. Reads no weights.

        Raises:
            kccl.Error: The file is damaged, or holds a model that the engine does not know.
        """
        self._file = GgufParts(path)
        self.path, self.files = self._file.path, self._file.files
        try:
            tensors = self._file.tensors
            self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self.dtypes = {name: tensor.quantisation for name, tensor in tensors.items()}
            self.config = self._read_config()
            is_gpt_oss = self.config.family == "gpt_oss"
            per_layer = _GPT_OSS_LAYER if is_gpt_oss else LAYER_NAMES
            self.names = layer_names(self.config, WHOLE_NAMES, per_layer)
            self._parts = parts_of(self.config, self.names, self._file)
        except BaseException:
            self.close()
            raise
        from ..text.tokenizer_gguf import has_tokenizer, unusable_ids

        self.has_tokenizer = has_tokenizer(self._file.metadata)
        self.notices = unusable_ids(self.path, self._file.metadata, self.config.vocab_size)
        self.ignored = ROPE_TABLES & self.shapes.keys()
        holders = {part.tensor for part in self._parts.values()}
        self.ignored |= holders
        self.shapes |= {name: part.shape for name, part in self._parts.items()}
        self.dtypes |= {name: self.dtypes[part.tensor] for name, part in self._parts.items()}

    def _read_config(self) -> ModelConfig:
        fields = Fields(self.path, self._file.metadata)
        check_type(fields)
        family = fields.text("general.architecture")
        if family not in _FAMILIES:
            raise fields.wrong("general.architecture", f"one of {', '.join(_FAMILIES)}")
        is_mixture = family in MIXTURES
        check_switches(fields, family, ("expert_count", "expert_used_count") * is_mixture)
        context = fields.integer(f"{family}.{_KEYS['context']}")
        # llama.cpp ignores the window of these architectures, but transformers applies it. So a
        # window that would have an effect is refused.
        window = f"{family}.attention.sliding_window"
        if family != "gpt-oss" and 0 < fields.integer(window, default=0) < context:
            raise fields.wrong(
                window,
                f"absent or at least the context, {context}: the file does not say which layers "
                "have the window; a folder in Hugging Face's layout does",
            )
        if WHOLE_NAMES["embedding"] not in self.shapes:
            raise kccl.Error(f"{self.path}: tensor {WHOLE_NAMES['embedding']} is missing")
        names = {own: f"{family}.{key}" for own, key in _KEYS.items()}
        if is_mixture:
            names["ffn"] = f"{family}.expert_feed_forward_length"
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
        num_layers = fields.integer(names["num_layers"])
        block = MXFP4.block if family == "gpt-oss" else 1
        try:
            return ModelConfig(
                family=_FAMILIES[family],
                num_layers=num_layers,
                num_lanes=lanes_for(num_heads, num_kv_heads, ffn, block),
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
                has_qk_norm=family in ("qwen3", "qwen3moe"),
                # If one layer has biases, all layers must have them, and the error names the
                # missing one.
                biases=tuple(
                    kind
                    for kind in BIASES
                    if self._has_biases(kind) or (kind == "qkv" and family == "qwen2")
                ),
                **experts(fields, family, num_layers),
                names=names,
            )
        except kccl.InvalidArgument as error:
            raise kccl.Error(f"{self.path}: {error}") from error

    def _has_biases(self, kind: str) -> bool:
        """Tells whether the file has a bias of this kind of op in any layer."""
        of_experts = "experts." if KINDS[kind].has_experts else ""
        names = (LAYER_NAMES[of_experts + name] for name in BIASES[kind])
        forms = [name.partition(OF_EXPERT)[0].partition("{}") for name in names]
        return any(
            held.startswith(begin) and held.endswith(end)
            for held in self.shapes
            for begin, _, end in forms
        )

    def _of_all_layers(self, fields: Fields, name: str, default: int | None = None) -> int:
        """Returns an integer field of at least 1. If the file has a value for each layer, these
        must be equal.
        """
        value = fields.value(name)
        if not isinstance(value, np.ndarray):
            return fields.integer(name, default=default, least=1)
        if value.dtype.kind not in "iu" or value.size == 0 or (value != value[0]).any():
            raise fields.wrong(name, "the same integer for all layers")
        if value[0] < 1:
            raise fields.wrong(name, "at least 1")
        return int(value[0])

    def file_of(self, name: str) -> Path:
        return self._file.file_of(self.main_of(name))

    def main_of(self, name: str) -> str:
        return self._parts[name].tensor if name in self._parts else name

    def read(self, name: str, start: int, stop: int) -> Stored:
        if name in self._parts:
            return read_part(self._file, self._parts[name], start, stop)
        return self._file.read(name, start, stop)

    def drawn(self, name: str) -> Blocks | None:
        stored = OF_GGUF[self.dtypes[name]]
        if not isinstance(stored, Blocks32 | Blocks256):
            return None
        return Blocks(lambda start, stop: self.read(name, start, stop).words, stored)

    def tokenizer(self) -> Tokenizer:
        from ..text.tokenizer_gguf import from_gguf

        return from_gguf(self.path, self._file.metadata)

    def defaults(self) -> Defaults:
        return defaults_of_gguf(self.path, self._file.metadata)

    def end_ids(self) -> tuple[int, ...]:
        from ..text.tokenizer_gguf import named_ends

        return named_ends(self.path, self._file.metadata, self.config.vocab_size)

    def close(self) -> None:
        self._file.close()
