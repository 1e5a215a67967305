"""Models in Hugging Face's folder layout: config.json, safetensors, tokenizer.json."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

import kccl

from .checkpoint import Source, layer_names
from .extras import library
from .fields import one_line, read_json, shown
from .hf_config import read_config
from .tokenizer_folder import TOKENIZER, from_folder

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_DTYPES = ("BF16", "F16", "F32")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

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
        self.config = read_config(path / "config.json")
        self.is_stacked = self.config.family == "laneformer"
        tables = (
            (_LANEFORMER_WHOLE, _LANEFORMER_LAYER)
            if self.is_stacked
            else (WHOLE_NAMES, LAYER_NAMES)
        )
        self.names = layer_names(self.config, *tables)
        self.has_tokenizer = (path / TOKENIZER).exists()
        self._files, held = _tensors(path)
        self.shapes = {name: shape for name, (_, shape) in held.items()}
        self.dtypes = {name: dtype for name, (dtype, _) in held.items()}
        # Tables of frequencies, which older files repeat in each layer; a copy of the embedding.
        self.ignored = frozenset(
            name
            for name in held
            if name.endswith("rotary_emb.inv_freq")
            or (self.config.is_tied and name == "lm_head.weight")
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
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise kccl.Error(f"{file}: cannot read tensor {name}: {one_line(error)}") from error

    def tokenizer(self) -> "Tokenizer":
        return from_folder(self.path)

    def close(self) -> None:
        pass


_Held = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor in a file."""


def _tensors(folder: Path) -> tuple[dict[str, Path], _Held]:
    """The file that holds each tensor, and what the tensors are."""
    index = folder / _INDEX
    if not index.exists():
        file = folder / _WEIGHTS
        if not file.exists():
            raise kccl.Error(f"{folder} has neither {_WEIGHTS} nor {_INDEX}")
        tensors = _known(file, _headers(file))
        return dict.fromkeys(tensors, file), tensors
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise kccl.Error(f"{index}: field weight_map is missing or names no tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise kccl.Error(
                f"{index}: tensor {shown(name)} is in {shown(str(file))}, "
                "must be in a file beside it"
            )
    tensors = {}
    for file in sorted(set(weight_map.values())):
        held = _headers(folder / file)
        for name in sorted(held):
            if weight_map.get(name) != file:
                raise kccl.Error(
                    f"{folder / file}: tensor {shown(name)} is here, but not by {_INDEX}"
                )
        for name in sorted(name for name in weight_map if weight_map[name] == file):
            if name not in held:
                raise kccl.Error(f"{folder / file}: tensor {shown(name)} is missing")
        tensors |= _known(folder / file, held)
    return {name: folder / file for name, file in weight_map.items()}, tensors


def _known(file: Path, held: _Held) -> _Held:
    """A file's tensors, all of a dtype that the engine reads."""
    for name, (dtype, _) in held.items():
        if dtype not in _DTYPES:
            raise kccl.Error(
                f"{file}: tensor {shown(name)} has dtype {dtype}, must be one of "
                f"{', '.join(_DTYPES)}"
            )
    return held


def _headers(file: Path) -> _Held:
    safetensors = library("safetensors")
    if not file.is_file():
        raise kccl.Error(f"{file} does not exist")
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
            }
    except OSError as error:
        raise kccl.Error(f"cannot read {file}: {one_line(error)}") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise kccl.Error(f"{file} is no safetensors file: {one_line(error)}") from error
