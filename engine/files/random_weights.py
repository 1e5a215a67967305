"""Checkpoints of known shapes with random weights, made when they are read: for tests, and for
benchmarks of models that are not at hand.
"""

import math
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..model.config import ModelConfig, is_vector, lanes_for
from ..model.rope import Llama3Scaling, Rope
from .checkpoint import DTYPES, Checkpoint, Source

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

_LEVELS = 1 << 16
# Norms weigh around 1, so that a forgotten norm, or two that are swapped, show.
_NORM_SPREAD = 0.1
# Likewise large enough that a forgotten bias shows.
_BIAS_SPREAD = 0.3


def _laneformer(**fields: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "delay": 2,
        "message_dtype": "bfloat16",
        "rope": Rope(is_interleaved=True),
    }
    return ModelConfig(family="laneformer", **defaults | fields)


def _ordinary(**fields: Any) -> ModelConfig:
    """A model whose lanes follow from its heads; with a tied embedding, unless told otherwise."""
    lanes = lanes_for(fields["num_heads"], fields["num_kv_heads"], fields["ffn"])
    return ModelConfig(num_lanes=lanes, **{"is_tied": True} | fields)


_LLAMA_31 = Llama3Scaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
)
_TINY = {"hidden": 64, "ffn": 96, "head_dim": 8, "vocab_size": 256, "context": 128}

MODELS = {
    "laneformer-2b": _laneformer(
        **{"num_layers": 15, "num_lanes": 8, "hidden": 3072, "ffn": 12288, "num_heads": 32},
        **{"num_kv_heads": 16, "head_dim": 96, "vocab_size": 32000, "context": 4096},
        **{"window": 2048, "window_layers": 10},
    ),
    # Llama-3.2-1B.
    "llama-1b": _ordinary(
        **{"family": "llama", "num_layers": 16, "hidden": 2048, "ffn": 8192, "num_heads": 32},
        **{"num_kv_heads": 8, "head_dim": 64, "vocab_size": 128256, "context": 131072},
        rope=Rope(theta=500_000.0, scaling=_LLAMA_31),
    ),
    "qwen3-0.6b": _ordinary(
        **{"family": "qwen3", "num_layers": 28, "hidden": 1024, "ffn": 3072, "num_heads": 16},
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "context": 40960},
        **{"norm_eps": 1e-6, "has_qk_norm": True, "rope": Rope(theta=1e6)},
    ),
    "qwen2.5-0.5b": _ordinary(
        **{"family": "qwen2", "num_layers": 24, "hidden": 896, "ffn": 4864, "num_heads": 14},
        **{"num_kv_heads": 2, "head_dim": 64, "vocab_size": 151936, "context": 32768},
        **{"norm_eps": 1e-6, "biases": ("qkv",), "rope": Rope(theta=1e6)},
    ),
    # Version 0.1, the one with a window.
    "mistral-7b": _ordinary(
        **{"family": "mistral", "num_layers": 32, "hidden": 4096, "ffn": 14336, "num_heads": 32},
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 32000, "context": 32768},
        **{"window": 4096, "window_layers": 32, "is_tied": False},
    ),
    # SmolLM2-135M, as GGUF files have it.
    "smollm2": _ordinary(
        **{"family": "llama", "num_layers": 30, "hidden": 576, "ffn": 1536, "num_heads": 9},
        **{"num_kv_heads": 3, "head_dim": 64, "vocab_size": 49152, "context": 8192},
        rope=Rope(theta=1e5, is_interleaved=True),
    ),
    "tiny-laneformer": _laneformer(
        **{"num_layers": 6, "num_lanes": 4, "num_heads": 16, "num_kv_heads": 8, "window": 8},
        **{"window_layers": 4, **_TINY},
    ),
    "tiny-llama": _ordinary(
        **{"family": "llama", "num_layers": 3, "num_heads": 9, "num_kv_heads": 3, **_TINY},
    ),
    "tiny-qwen3": _ordinary(
        **{"family": "qwen3", "num_layers": 3, "num_heads": 8, "num_kv_heads": 4, **_TINY},
        **{"has_qk_norm": True, "norm_eps": 1e-6},
    ),
    "tiny-mistral": _ordinary(
        **{"family": "mistral", "num_layers": 3, "num_heads": 8, "num_kv_heads": 4, **_TINY},
        **{"window": 16, "window_layers": 3},
    ),
    "tiny-qwen2": _ordinary(
        **{"family": "qwen2", "num_layers": 3, "num_heads": 8, "num_kv_heads": 2, **_TINY},
        **{"norm_eps": 1e-6, "biases": ("qkv",), "rope": Rope(theta=1e6)},
    ),
    # Its sizes are multiples of 16, as the monokernel needs them, and the simulator can run it.
    "tiny-tiles": _laneformer(
        **{"num_layers": 2, "num_lanes": 2, "hidden": 64, "ffn": 64, "num_heads": 4},
        **{"num_kv_heads": 2, "head_dim": 16, "vocab_size": 128, "context": 64},
        **{"window": 3, "window_layers": 1},
    ),
}


def random_checkpoint(
    model: str | ModelConfig, *, seed: int = 0, dtype: str = "bfloat16", **changes: Any
) -> Checkpoint:
    """A checkpoint whose tensors are drawn when they are read, the same ones each time.

    Their scale keeps activations and logits near 1 in size.

    Args:
        model: A name in MODELS, or a configuration.
        seed: Of the weights; 0 or more.
        dtype: What they are stored in: "bfloat16" or "float16".
        changes: Fields of the configuration that differ from the model's, as in num_layers=2.

    Raises:
        InvalidArgument: There is no such model, or no such configuration.
    """
    if isinstance(model, str) and model not in MODELS:
        names = ", ".join(MODELS)
        raise kccl.InvalidArgument(f"random weights: {model!r} is none of the shapes {names}")
    config = MODELS[model] if isinstance(model, str) else model
    name = model if isinstance(model, str) else model.family
    return Checkpoint(RandomSource(replace(config, **changes), seed, name, dtype))


class RandomSource(Source):
    """Tensors that lie in no file."""

    is_stacked = True

    def __init__(self, config: ModelConfig, seed: int, name: str, dtype: str = "bfloat16") -> None:
        self.path = Path(f"random weights of {name}")
        self.config = config
        self.shapes = dict(config.shapes())
        if config.lm_head == "vocab_parallel":
            lanes = config.num_lanes
            self.shapes["head"] = (lanes, config.vocab_size // lanes, config.hidden)
        self.names = {name: name for name in self.shapes}
        self.dtypes = dict.fromkeys(self.shapes, "F16" if dtype == "float16" else "BF16")
        self._dtype = dtype
        self._seed = seed

    def file_of(self, name: str) -> Path:
        return self.path

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """As Source.read(). An entry's numbers do not depend on which others are read with it."""
        shape = self.shapes[name]
        size = math.prod(shape[1:])
        # A word holds four random indices.
        words = -(-size // 4)
        bits = np.random.PCG64([self._seed, zlib.crc32(name.encode())])
        bits.advance(start * words)
        indices = bits.random_raw((stop - start) * words).view(np.uint16)
        levels = _levels(*self._mean_and_spread(name), self._dtype)
        # No index is too large, and "wrap" is the fastest way to have none checked.
        words_of = np.take(levels.view(np.uint16), indices, mode="wrap")
        values = words_of.reshape(stop - start, -1)[:, :size].view(levels.dtype)
        return values.reshape(stop - start, *shape[1:])

    def _mean_and_spread(self, name: str) -> tuple[float, float]:
        c, part = self.config, name.rpartition(".")[2]
        if part.endswith("norm"):
            return 1.0, _NORM_SPREAD
        if is_vector(part):
            adds_to_residual = part in ("bo", "b2")
            return 0.0, _BIAS_SPREAD * ((2 * c.num_layers) ** -0.5 if adds_to_residual else 1.0)
        if part == "embedding" and not c.is_tied:
            return 0.0, 1.0
        # What the modules add to the residual sums up to about 1 over all layers and lanes.
        fan_in = {"wo": c.num_heads * c.head_dim, "w2": c.ffn}.get(part)
        return 0.0, (fan_in * 2 * c.num_layers if fan_in else c.hidden) ** -0.5

    def tokenizer(self) -> "Tokenizer":
        raise kccl.Error(f"{self.path}: there is no tokenizer")

    def close(self) -> None:
        pass


@cache
def _normal_quantiles() -> NDArray[np.float64]:
    """Equally likely values of the normal distribution."""
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse((i + 0.5) / _LEVELS) for i in range(_LEVELS // 2, _LEVELS)])
    return np.concatenate([-upper[::-1], upper])


@cache
def _levels(mean: float, spread: float, dtype: str) -> NDArray[Any]:
    """A table: indexed by 16 random bits it gives about normally distributed numbers."""
    return (mean + spread * _normal_quantiles()).astype(DTYPES[dtype])
