"""Models in Hugging Face's folder layout: config.json, safetensors, tokenizer.json."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.extras import library
from ..base.fields import one_line, unmapped
from ..text.tokenizer_folder import from_folder, has_tokenizer, named_ends
from .checkpoint import Source, layer_names
from .hf_config import read_config
from .hf_files import Held, check_adapter, check_folder, read_headers

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# What all names but the head's begin with. Checkpoints of the bare model leave it out.
_PREFIX = "model."
# Elements of the head that are compared with the embedding at a time.
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
}


class FolderSource(Source):
    """A folder with config.json and one or several safetensors files."""

    def __init__(self, path: Path) -> None:
        """Reads the configuration and the headers of the files with weights.

        Raises:
            kccl.Error: A file is missing, damaged, or not of a kind that the engine knows.
        """
        self.path = path
        check_adapter(path)
        check_folder(path)
        self.config = read_config(path / "config.json")
        self.is_stacked = self.config.family == "laneformer"
        tables: tuple[Mapping[str, str], Mapping[str, str]] = (
            (_LANEFORMER_WHOLE, _LANEFORMER_LAYER)
            if self.is_stacked
            else (WHOLE_NAMES, LAYER_NAMES)
        )
        self._files, held = read_headers(path)
        self.shapes = {name: shape for name, (_, shape) in held.items()}
        self.dtypes = {name: dtype for name, (dtype, _) in held.items()}
        whole, per_layer = tables if self.is_stacked else _without_prefix(held, *tables)
        embedding, head = whole["embedding"], whole["head"]
        # As transformers ties: what the file has serves as both. If it has both, they are tied only
        # if they are the same.
        if self.config.is_tied and head in held:
            if embedding not in held:
                whole = {**whole, "embedding": head}
            elif not self._is_same(embedding, head):
                self.config = replace(self.config, is_tied=False)
        self.names = layer_names(self.config, whole, per_layer)
        self.mapped_bytes = max(file.stat().st_size for file in {*self._files.values()})
        self.has_tokenizer = has_tokenizer(path)
        # Tables of frequencies, which older files repeat in each layer; a copy of the embedding.
        self.ignored = frozenset(
            name
            for name in held
            if name.endswith("rotary_emb.inv_freq") or (self.config.is_tied and name == head)
        )

    def _is_same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values."""
        if self.shapes[one] != self.shapes[other] or self.dtypes[one] != self.dtypes[other]:
            return False
        rows, *rest = self.shapes[one]
        at_once = max(1, _COMPARED // max(1, math.prod(rest)))
        return all(
            np.array_equal(self.read(one, start, stop), self.read(other, start, stop))
            for start in range(0, rows, at_once)
            for stop in (min(start + at_once, rows),)
        )

    def file_of(self, name: str) -> Path:
        return self._files.get(name, self.path)

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        file = self._files[name]
        safetensors = library("safetensors")
        # Opened for each tensor: closing gives back the pages of the mapped file.
        try:
            with safetensors.safe_open(file, framework="np") as opened:
                read: NDArray[Any] = opened.get_slice(name)[start:stop]
                return read
        except (safetensors.SafetensorError, MemoryError, OSError, ValueError) as error:
            told = f"{file}: cannot read tensor {name}: {one_line(error)}"
            raise (unmapped(file, error) or kccl.Error(told)) from error

    def tokenizer(self) -> "Tokenizer":
        return from_folder(
            self.path, self.config.vocab_size, is_laneformer=self.config.family == "laneformer"
        )

    def end_ids(self) -> tuple[int, ...]:
        return named_ends(self.path, self.config.vocab_size)

    def close(self) -> None:
        pass


def _without_prefix(
    held: Held, whole: Mapping[str, str], per_layer: Mapping[str, str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The names as this file has them: with "model." in front, or all without."""
    bare = {own: name.removeprefix(_PREFIX) for own, name in whole.items()}
    if whole["embedding"] in held or bare["embedding"] not in held:
        return whole, per_layer
    return bare, {own: name.removeprefix(_PREFIX) for own, name in per_layer.items()}
