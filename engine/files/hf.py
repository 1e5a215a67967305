"""Reads models in Hugging Face's folder layout: config.json, safetensors, tokenizer.json."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.base import Stored
from ..formats.table import IN_FILES
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_folder import from_folder, has_tokenizer, named_ends, unusable
from .defaults import Defaults, read_defaults
from .fused_experts import ExpertPart, find_fused
from .hf_config import read_config
from .hf_files import Held, check_adapter, check_folder, read_headers
from .pairs import Pairs
from .quantization import read_quantization
from .quantized import QuantizedMatrix
from .quantized_layouts import DTYPES, find_quantized
from .schemes import Quantization
from .source import Source, layer_names
from .tensors import Tensors

# The prefix of all tensors' names except the head's. Models that were saved without a head lack the
# prefix.
_PREFIX = "model."
# How many elements of head and embedding are compared at a time.
_COMPARED = 1 << 22

_LANEFORMER_WHOLE = {
    "embedding": "model.tok_embeddings.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LANEFORMER_LAYER = {
    **{part: f"model.layers.{{}}.attention.{part}.weight" for part in ("wq", "wk", "wv", "wo")},
    **{part: f"model.layers.{{}}.feed_forward.{part}.weight" for part in ("w1", "w2", "w3")},
    **{part: f"model.layers.{{}}.{part}.weight" for part in ("attention_norm", "ffn_norm")},
}
WHOLE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER_NAMES = {
    "wq": "model.layers.{}.self_attn.q_proj.weight",
    "wk": "model.layers.{}.self_attn.k_proj.weight",
    "wv": "model.layers.{}.self_attn.v_proj.weight",
    "wo": "model.layers.{}.self_attn.o_proj.weight",
    "bq": "model.layers.{}.self_attn.q_proj.bias",
    "bk": "model.layers.{}.self_attn.k_proj.bias",
    "bv": "model.layers.{}.self_attn.v_proj.bias",
    "bo": "model.layers.{}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "w1": "model.layers.{}.mlp.gate_proj.weight",
    "w3": "model.layers.{}.mlp.up_proj.weight",
    "w2": "model.layers.{}.mlp.down_proj.weight",
    "b1": "model.layers.{}.mlp.gate_proj.bias",
    "b3": "model.layers.{}.mlp.up_proj.bias",
    "b2": "model.layers.{}.mlp.down_proj.bias",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "sinks": "model.layers.{}.self_attn.sinks",
    "router": "model.layers.{}.mlp.gate.weight",
    "experts.w1": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "experts.w3": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "experts.w2": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    "experts.b1": "model.layers.{}.mlp.experts.{}.gate_proj.bias",
    "experts.b3": "model.layers.{}.mlp.experts.{}.up_proj.bias",
    "experts.b2": "model.layers.{}.mlp.experts.{}.down_proj.bias",
}
# Family -> the names that differ from LAYER_NAMES. gpt-oss's experts are fused: fused_experts.py.
_OF_FAMILY = {
    "mixtral": {
        "router": "model.layers.{}.block_sparse_moe.gate.weight",
        "experts.w1": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "experts.w3": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        "experts.w2": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    },
    "gpt_oss": {
        "router": "model.layers.{}.mlp.router.weight",
        "router_bias": "model.layers.{}.mlp.router.bias",
    },
}


class FolderSource(Source):
    """A folder with config.json and one or several safetensors files."""

    def __init__(self, path: Path) -> None:
        """Reads the configuration and the headers of the files with weights.

        Raises:
            kccl.Error: A file is missing or damaged, or the engine does not support it.
        """
        self.path = path
        check_adapter(path)
        check_folder(path)
        self.config = read_config(path / "config.json")
        self.is_stacked = self.config.family == "laneformer"
        tables: tuple[Mapping[str, str], Mapping[str, str]] = (
            (_LANEFORMER_WHOLE, _LANEFORMER_LAYER)
            if self.is_stacked
            else (WHOLE_NAMES, LAYER_NAMES | _OF_FAMILY.get(self.config.family, {}))
        )
        quantization = read_quantization(path / "config.json")
        files, held = read_headers(path, DTYPES if quantization else ())
        self._tensors = Tensors(path, files, held)
        self._made: dict[str, QuantizedMatrix | ExpertPart] = {}
        self.shapes = {name: shape for name, (_, shape) in held.items()}
        self.dtypes = {name: dtype for name, (dtype, _) in held.items()}
        whole, per_layer = tables if self.is_stacked else _without_prefix(held, *tables)
        embedding, head = whole["embedding"], whole["head"]
        # As in transformers: if the configuration ties head and embedding, and the file has only
        # one of them, that one is used for both. If the file has both, they are tied only if they
        # are equal.
        if self.config.is_tied and head in held:
            if embedding not in held:
                whole = {**whole, "embedding": head}
            elif not self._is_same(embedding, head):
                self.config = replace(self.config, is_tied=False)
        self.names = layer_names(self.config, whole, per_layer)
        self.files = {*files.values()}
        self.mapped_bytes = max(file.stat().st_size for file in self.files)
        self.has_tokenizer = has_tokenizer(path)
        # Ignores the tables of frequencies that older files have in each layer, and a head that is
        # a copy of the embedding.
        self.ignored = frozenset(
            name
            for name in held
            if name.endswith("rotary_emb.inv_freq") or (self.config.is_tied and name == head)
        )
        if self.config.family == "gpt_oss":
            self._take(find_fused(self._tensors, self.config, self.names))
        if quantization is not None:
            self._take_quantized(quantization)
        self.notices += unusable(path, self.config.vocab_size)

    def _take(self, found: Mapping[str, QuantizedMatrix | ExpertPart]) -> None:
        """Adds tensors that are made of others, such as a quantised matrix of its numbers and
        scales. Ignores the tensors of which they are made.
        """
        used = {name for each in found.values() for name in each.uses}
        self._made |= found
        self.ignored |= used - found.keys()
        formats = {name: each.format.in_files for name, each in found.items()}
        self.shapes = {**self.shapes, **{name: each.shape for name, each in found.items()}}
        self.dtypes = {**self.dtypes, **formats}

    def _take_quantized(self, quantization: Quantization) -> None:
        found = find_quantized(quantization, self._tensors, self.config, self.names)
        self._take(found)
        if found and quantization.rounds_activations:
            self.notices += (
                "activations stay in FP32, though the model asks for "
                f"{quantization.rounds_activations} bits before each product",
            )

    def _is_same(self, one: str, other: str) -> bool:
        """Tells whether two tensors have the same values."""
        if self.shapes[one] != self.shapes[other] or self.dtypes[one] != self.dtypes[other]:
            return False
        if self.dtypes[one] not in IN_FILES:
            # Quantised numbers cannot be compared without their scales.
            return False
        rows, *rest = self.shapes[one]
        at_once = max(1, _COMPARED // max(1, math.prod(rest)))
        return all(
            np.array_equal(self._values(one, start, stop), self._values(other, start, stop))
            for start in range(0, rows, at_once)
            for stop in (min(start + at_once, rows),)
        )

    def _values(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self.read(name, start, stop).values()

    def file_of(self, name: str) -> Path:
        return self._tensors.files.get(self.main_of(name), self.path)

    def main_of(self, name: str) -> str:
        return self._made[name].main if name in self._made else name

    def read(self, name: str, start: int, stop: int) -> Stored:
        if name in self._made:
            return self._made[name].read(start, stop)
        read = self._tensors.read(name, slice(start, stop))
        stored_in = IN_FILES[self.dtypes[name]]
        return Stored(stored_in, read.view(stored_in.word))

    def drawn(self, name: str) -> Pairs | None:
        """See Source."""
        made = self._made.get(name)
        return made.pairs if isinstance(made, ExpertPart) else None

    def tokenizer(self) -> Tokenizer:
        return from_folder(
            self.path, self.config.vocab_size, is_laneformer=self.config.family == "laneformer"
        )

    def defaults(self) -> Defaults:
        return read_defaults(self.path)

    def end_ids(self) -> tuple[int, ...]:
        return named_ends(self.path, self.config.vocab_size)

    def close(self) -> None:
        self._tensors.forget()


def _without_prefix(
    held: Held, whole: Mapping[str, str], per_layer: Mapping[str, str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Returns the tables with "model." in front of names, or without, as the file has it."""
    bare = {own: name.removeprefix(_PREFIX) for own, name in whole.items()}
    if whole["embedding"] in held or bare["embedding"] not in held:
        return whole, per_layer
    return bare, {own: name.removeprefix(_PREFIX) for own, name in per_layer.items()}
