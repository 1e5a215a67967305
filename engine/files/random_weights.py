"""Makes checkpoints with random weights, of the shapes of known models. Tests use them, and
benchmarks of models whose files this machine does not have.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.parts import in_parts
from ..formats.base import Format, Stored
from ..formats.float32 import FLOAT32
from ..formats.mxfp4 import MXFP4
from ..formats.table import MULTIPLIED, ON_HOST
from ..model.config import ModelConfig, is_vector, lanes_for
from ..model.experts import Experts
from ..model.rope import Llama3Scaling, Rope
from ..model.rope_scaling import YarnScaling, yarn_attention_factor
from ..text.tokenizer import Tokenizer
from .checkpoint import Checkpoint
from .drawn import Drawn, blocks_of, drawn
from .source import Source

_LEVELS = 1 << 16
# The largest random word, and how many words a thread draws at a time.
_MOST_WORD, _AT_ONCE = (1 << 64) - 1, 1 << 14
# The spread of the norms' weights around 1. With different weights, a test fails if a norm is
# forgotten, or taken for another.
_NORM_SPREAD = 0.1
# The spread of biases. It is so large that a test fails if a bias is forgotten.
_BIAS_SPREAD = 0.3


def _laneformer(**fields: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "delay": 2,
        "message_dtype": "bfloat16",
        "rope": Rope(is_interleaved=True),
    }
    return ModelConfig(family="laneformer", **defaults | fields)


def _ordinary(**fields: Any) -> ModelConfig:
    """Returns the configuration of a model without delay. lanes_for() chooses the number of its
    lanes. By default its embedding is tied.
    """
    lanes = lanes_for(fields["num_heads"], fields["num_kv_heads"], fields["ffn"])
    return ModelConfig(num_lanes=lanes, **{"is_tied": True} | fields)


_LLAMA_31 = Llama3Scaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
)
# gpt-oss's YaRN does not round the ramp's ends.
_YARN_32 = YarnScaling(factor=32.0, original_context=4096, truncate=False)
_TINY = {"hidden": 64, "ffn": 96, "head_dim": 8, "vocab_size": 256, "context": 128}


def _gpt_oss(**fields: Any) -> ModelConfig:
    """Returns a shape of gpt-oss: every other layer, beginning with the first, has the window."""
    experts = fields.pop("experts")
    return ModelConfig(
        family="gpt_oss",
        window_layers=tuple(range(0, fields["num_layers"], 2)),
        **{"has_sinks": True, "swiglu_limit": 7.0, "experts": experts},
        biases=("qkv", "out", "router", "expert_gate_up", "expert_down"),
        **fields,
    )


# The fields that are the same in both sizes of gpt-oss.
_GPT_OSS: dict[str, Any] = {
    **{"num_lanes": 2, "hidden": 2880, "ffn": 2880, "num_heads": 64, "num_kv_heads": 8},
    **{"head_dim": 64, "vocab_size": 201088, "context": 131072, "window": 128},
    "rope": Rope(theta=150_000.0, scaling=_YARN_32, attention_factor=yarn_attention_factor(32.0)),
}

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
    # Llama-3.1-8B.
    "llama-8b": _ordinary(
        **{"family": "llama", "num_layers": 32, "hidden": 4096, "ffn": 14336, "num_heads": 32},
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 128256, "context": 131072},
        **{"is_tied": False, "rope": Rope(theta=500_000.0, scaling=replace(_LLAMA_31, factor=8.0))},
    ),
    "qwen3-0.6b": _ordinary(
        **{"family": "qwen3", "num_layers": 28, "hidden": 1024, "ffn": 3072, "num_heads": 16},
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "context": 40960},
        **{"norm_eps": 1e-6, "has_qk_norm": True, "rope": Rope(theta=1e6)},
    ),
    "qwen3-8b": _ordinary(
        **{"family": "qwen3", "num_layers": 36, "hidden": 4096, "ffn": 12288, "num_heads": 32},
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "context": 40960},
        **{"norm_eps": 1e-6, "has_qk_norm": True, "rope": Rope(theta=1e6), "is_tied": False},
    ),
    "qwen2.5-0.5b": _ordinary(
        **{"family": "qwen2", "num_layers": 24, "hidden": 896, "ffn": 4864, "num_heads": 14},
        **{"num_kv_heads": 2, "head_dim": 64, "vocab_size": 151936, "context": 32768},
        **{"norm_eps": 1e-6, "biases": ("qkv",), "rope": Rope(theta=1e6)},
    ),
    # Version 0.1 of Mistral 7B, which has a window.
    "mistral-7b": _ordinary(
        **{"family": "mistral", "num_layers": 32, "hidden": 4096, "ffn": 14336, "num_heads": 32},
        **{"num_kv_heads": 8, "head_dim": 128, "vocab_size": 32000, "context": 32768},
        **{"window": 4096, "window_layers": 32, "is_tied": False},
    ),
    # SmolLM2-135M as GGUF files have it, with interleaved RoPE.
    "smollm2": _ordinary(
        **{"family": "llama", "num_layers": 30, "hidden": 576, "ffn": 1536, "num_heads": 9},
        **{"num_kv_heads": 3, "head_dim": 64, "vocab_size": 49152, "context": 8192},
        rope=Rope(theta=1e5, is_interleaved=True),
    ),
    "qwen3-30b-a3b": _ordinary(
        **{"family": "qwen3_moe", "num_layers": 48, "hidden": 2048, "ffn": 768, "num_heads": 32},
        **{"num_kv_heads": 4, "head_dim": 128, "vocab_size": 151936, "context": 40960},
        **{"norm_eps": 1e-6, "has_qk_norm": True, "rope": Rope(theta=1e6), "is_tied": False},
        experts=Experts(num=128, chosen=8),
    ),
    "gpt-oss-20b": _gpt_oss(num_layers=24, experts=Experts(num=32, chosen=4), **_GPT_OSS),
    "gpt-oss-120b": _gpt_oss(num_layers=36, experts=Experts(num=128, chosen=4), **_GPT_OSS),
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
    "tiny-qwen3-moe": _ordinary(
        **{"family": "qwen3_moe", "num_layers": 3, "num_heads": 8, "num_kv_heads": 4, **_TINY},
        **{"has_qk_norm": True, "norm_eps": 1e-6, "experts": Experts(num=10, chosen=3)},
    ),
    "tiny-gpt-oss": _gpt_oss(
        **{"num_layers": 4, "num_lanes": 2, "num_heads": 8, "num_kv_heads": 4, "window": 12},
        **_TINY | {"ffn": 128, "experts": Experts(num=7, chosen=2)},
        rope=Rope(
            scaling=YarnScaling(factor=4.0, original_context=32, truncate=False),
            attention_factor=yarn_attention_factor(4.0),
        ),
    ),
    # The sizes are multiples of 16, as the monokernel requires, and small enough for the simulator.
    "tiny-tiles": _laneformer(
        **{"num_layers": 2, "num_lanes": 2, "hidden": 64, "ffn": 64, "num_heads": 4},
        **{"num_kv_heads": 2, "head_dim": 16, "vocab_size": 128, "context": 64},
        **{"window": 3, "window_layers": 1},
    ),
}


# Shape -> names of matrices within the layer -> the format in which they are published. All others
# are published in 16 bits.
_IN_MXFP4 = dict.fromkeys(("w1", "w3", "w2"), "mxfp4")
_STORED = {"gpt-oss-20b": _IN_MXFP4, "gpt-oss-120b": _IN_MXFP4}


def shape_of(name: str) -> ModelConfig:
    """Returns the configuration of a name in MODELS. The name may end in ":" and a number of
    layers: then the model has only that many, so that a part of a large model fits into memory.

    Raises:
        InvalidArgument: There is no such shape, or it has fewer layers.
    """
    model, colon, layers = name.partition(":")
    if model not in MODELS:
        names = ", ".join(MODELS)
        raise kccl.InvalidArgument(f"random weights: {model!r} is none of the shapes {names}")
    config = MODELS[model]
    if not colon:
        return config
    if not (layers.isdecimal() and len(layers) < 5 and 1 <= int(layers) <= config.num_layers):
        raise kccl.InvalidArgument(
            f"random weights: {name!r} must end in a number of layers from 1 to {config.num_layers}"
        )
    left = int(layers)
    windows = config.window_layers
    if isinstance(windows, tuple):
        windows = tuple(layer for layer in windows if layer < left)
    else:
        windows = min(windows, left)
    delay = min(config.delay, left)
    return replace(config, num_layers=left, window_layers=windows, delay=delay)


def random_checkpoint(
    model: str | ModelConfig,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    stored: Mapping[str, str] | None = None,
    **changes: Any,
) -> Checkpoint:
    """Returns a checkpoint whose tensors are drawn at random when they are read. A tensor depends
    only on its name, shape, format and the seed.

    The scale of the weights keeps activations and logits near 1 in size.

    Args:
        model: A name that shape_of() knows, or a configuration.
        seed: The seed of the weights, 0 or more.
        dtype: The type of the stored weights: "bfloat16" or "float16".
        stored: Name within the layer, "embedding" or "head" -> the name of the format in which
            these matrices are stored instead. It must be a format that an executor multiplies.
            None: the formats in which the model is published.
        changes: Fields of the configuration to replace, as in num_layers=2.

    Raises:
        InvalidArgument: There is no such model, or no such configuration.
    """
    config = shape_of(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else model.family
    if stored is None and isinstance(model, str):
        stored = _STORED.get(model.partition(":")[0])
    return Checkpoint(RandomSource(replace(config, **changes), seed, name, dtype, stored))


class RandomSource(Source):
    """A source of random tensors, without a file."""

    is_stacked = True

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        name: str,
        dtype: str = "bfloat16",
        stored: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(f"random weights of {name}")
        self.config = config
        self.shapes = dict(config.shapes())
        if config.lm_head == "vocab_parallel":
            lanes = config.num_lanes
            self.shapes["head"] = (lanes, config.vocab_size // lanes, config.hidden)
        self.names = {name: name for name in self.shapes}
        others = {} if stored is None else stored
        self._formats = {
            name: (MULTIPLIED | ON_HOST)[others.get(name.rpartition(".")[2], dtype)]
            for name in self.shapes
        }
        self.dtypes = {name: each.in_files for name, each in self._formats.items()}
        self._seed = seed

    def file_of(self, name: str) -> Path:
        return self.path

    def read(self, name: str, start: int, stop: int) -> Stored:
        """Draws some entries of a tensor, as Source.read() reads them. An entry's numbers do not
        depend on which others are drawn with it.
        """
        shape = self.shapes[name]
        size = math.prod(shape[1:])
        if (matrix := self.drawn(name)) is not None:
            each = size // MXFP4.block
            blocks = blocks_of(matrix, start * each, (stop - start) * each)
            return Stored(MXFP4, blocks.reshape(stop - start, *shape[1:-1], -1))
        # One random word holds four random indices.
        words = -(-size // 4)
        num = (stop - start) * words
        stored_in = self._formats[name]
        # Formats of blocks are rounded from random numbers in FP32.
        drawn_in = stored_in if stored_in.block == 1 else FLOAT32
        levels = _levels(*self._mean_and_spread(name), drawn_in)
        words_of = np.empty(4 * num, levels.dtype)

        def draw_from(first: int) -> None:
            bits = np.random.PCG64([self._seed, zlib.crc32(name.encode())])
            bits.advance(start * words + first)
            some = np.random.Generator(bits).integers(
                _MOST_WORD, size=min(_AT_ONCE, num - first), dtype=np.uint64, endpoint=True
            )
            out = words_of[4 * first : 4 * (first + _AT_ONCE)]
            # Every 16-bit index is valid. mode="wrap" avoids the check, and is the fastest.
            np.take(levels, some.view(np.uint16), mode="wrap", out=out)

        in_parts(draw_from, num, _AT_ONCE)
        entries = words_of.reshape(stop - start, -1)[:, :size]
        drawn = Stored(drawn_in, entries.reshape(stop - start, *shape[1:]))
        return drawn.turned_into(stored_in)

    def drawn(self, name: str) -> Drawn | None:
        """See Source. Matrices in MXFP4 are drawn so, everywhere: a large model has tens of
        gigabytes of them.
        """
        if self._formats[name] is not MXFP4:
            return None
        _, spread = self._mean_and_spread(name)
        return drawn(zlib.crc32(name.encode(), self._seed), spread)

    def _mean_and_spread(self, name: str) -> tuple[float, float]:
        c, part = self.config, name.rpartition(".")[2]
        if part.endswith("norm"):
            return 1.0, _NORM_SPREAD
        if is_vector(part):
            adds_to_residual = part in ("bo", "b2")
            return 0.0, _BIAS_SPREAD * ((2 * c.num_layers) ** -0.5 if adds_to_residual else 1.0)
        if part == "embedding" and not c.is_tied:
            return 0.0, 1.0
        # With this spread the outputs of all modules, which are added to the residual, sum up to a
        # size of about 1.
        fan_in = {"wo": c.num_heads * c.head_dim, "w2": c.ffn}.get(part)
        return 0.0, (fan_in * 2 * c.num_layers if fan_in else c.hidden) ** -0.5

    def tokenizer(self) -> Tokenizer:
        raise kccl.Error(f"{self.path}: there is no tokenizer")

    def close(self) -> None:
        pass


@cache
def _normal_quantiles() -> NDArray[np.float64]:
    """Returns _LEVELS quantiles of the standard normal distribution, at equal probabilities."""
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse((i + 0.5) / _LEVELS) for i in range(_LEVELS // 2, _LEVELS)])
    return np.concatenate([-upper[::-1], upper])


@cache
def _levels(mean: float, spread: float, stored_in: Format) -> NDArray[Any]:
    """Returns a table of a format's words, indexed by 16 random bits. The numbers are approximately
    normally distributed.
    """
    return stored_in.from_values(mean + spread * _normal_quantiles())
