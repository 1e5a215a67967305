"""Models in GGUF files: the configuration from the metadata, quantised tensors in BF16."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kccl

from .checkpoint import Source, layer_names
from .config import ModelConfig, lanes_for
from .fields import Fields
from .gguf_file import GgufFile
from .rope import LinearScaling, Rope, Scaling, TableScaling

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_FAMILIES = ("llama", "qwen3")
# The factors of Llama 3.1's RoPE scaling.
_ROPE_FACTORS = "rope_freqs.weight"
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
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "w1": "blk.{}.ffn_gate.weight",
    "w3": "blk.{}.ffn_up.weight",
    "w2": "blk.{}.ffn_down.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
}


class GgufSource(Source):
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            kccl.Error: It is damaged, or holds a model that the engine does not know.
        """
        self.path = path
        self._file = GgufFile(path)
        try:
            tensors = self._file.tensors
            self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self.dtypes = {name: tensor.quantisation for name, tensor in tensors.items()}
            self.config = self._read_config()
            self.names = layer_names(self.config, WHOLE_NAMES, LAYER_NAMES)
        except BaseException:
            self.close()
            raise
        self.has_tokenizer = "tokenizer.ggml.model" in self._file.metadata
        self.ignored = frozenset({_ROPE_FACTORS} & self.shapes.keys())

    def _read_config(self) -> ModelConfig:
        fields = Fields(self.path, self._file.metadata)
        family = fields.text("general.architecture")
        if family not in _FAMILIES:
            raise fields.wrong("general.architecture", f"one of {', '.join(_FAMILIES)}")
        for name in ("expert_count", "attention.sliding_window"):
            if fields.integer(f"{family}.{name}", default=0):
                raise fields.wrong(f"{family}.{name}", "absent or 0")
        if WHOLE_NAMES["embedding"] not in self.shapes:
            raise kccl.Error(f"{self.path}: tensor {WHOLE_NAMES['embedding']} is missing")
        hidden = fields.integer(f"{family}.embedding_length")
        num_heads = self._of_all_layers(fields, f"{family}.attention.head_count")
        kv_name = f"{family}.attention.head_count_kv"
        num_kv_heads = self._of_all_layers(fields, kv_name) if kv_name in fields else num_heads
        ffn = self._of_all_layers(fields, f"{family}.feed_forward_length")
        if min(num_heads, num_kv_heads, ffn) < 1:
            raise kccl.Error(f"{self.path}: the metadata has a number of heads, or a ffn, below 1")
        head_dim = fields.integer(f"{family}.attention.key_length", default=hidden // num_heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if fields.integer(f"{family}.{name}", default=head_dim) != head_dim:
                raise fields.wrong(f"{family}.{name}", f"the head's size, {head_dim}")
        try:
            return ModelConfig(
                # mypy does not see that one of _FAMILIES is a Family.
                family="llama" if family == "llama" else "qwen3",
                num_layers=fields.integer(f"{family}.block_count"),
                num_lanes=lanes_for(num_heads, num_kv_heads, ffn),
                hidden=hidden,
                ffn=ffn,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                vocab_size=fields.integer(
                    f"{family}.vocab_size", default=self.shapes[WHOLE_NAMES["embedding"]][0]
                ),
                context=fields.integer(f"{family}.context_length"),
                norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
                rope=Rope(
                    theta=fields.number(f"{family}.rope.freq_base", default=10_000.0),
                    # Files of Llama have the rows of wq and wk permuted for pairs (2i, 2i+1).
                    is_interleaved=family == "llama",
                    scaling=self._scaling(fields, family),
                ),
                attention_scale=fields.number(f"{family}.attention.scale", default=0.0),
                is_tied=WHOLE_NAMES["head"] not in self.shapes,
                has_qk_norm=family == "qwen3",
            )
        except kccl.InvalidArgument as error:
            raise kccl.Error(f"{self.path}: {error}") from error

    def _of_all_layers(self, fields: Fields, name: str) -> int:
        """A field that some files give once for each layer."""
        value = fields.value(name)
        if not isinstance(value, np.ndarray):
            return fields.integer(name)
        if value.dtype.kind not in "iu" or value.size == 0 or (value != value[0]).any():
            raise fields.wrong(name, "the same integer for all layers")
        return int(value[0])

    def _scaling(self, fields: Fields, family: str) -> Scaling | None:
        if _ROPE_FACTORS in self.shapes:
            shape = self.shapes[_ROPE_FACTORS]
            if len(shape) != 1:
                raise kccl.Error(
                    f"{self.path}: tensor {_ROPE_FACTORS} has shape {list(shape)}, must have one "
                    "axis"
                )
            factors = self._file.read(_ROPE_FACTORS, 0, shape[0])
            return TableScaling(tuple(float(factor) for factor in factors))
        kind = fields.text(f"{family}.rope.scaling.type", default="none")
        if kind == "none":
            return None
        if kind == "linear":
            return LinearScaling(fields.number(f"{family}.rope.scaling.factor"))
        raise fields.wrong(f"{family}.rope.scaling.type", "one of none, linear")

    def file_of(self, name: str) -> Path:
        return self.path

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self._file.read(name, start, stop)

    def tokenizer(self) -> "Tokenizer":
        from .tokenizer_gguf import from_gguf

        return from_gguf(self.path, self._file.metadata)

    def close(self) -> None:
        self._file.close()
