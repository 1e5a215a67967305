"""Writes a folder in Hugging Face's layout with random weights of a shape of gpt-oss, in seconds.

    python -m kccl.bench.random_folder gpt-oss-20b FOLDER

Experts are in MXFP4, other matrices in BF16, as they are published. Numbers repeat every 64 MiB, so
the folder measures how a model is read, and is no model. It has no tokenizer.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kccl
from kccl.engine.files.drawn import SCALES, drawn
from kccl.engine.files.random_weights import shape_of
from kccl.engine.model.config import ModelConfig

_POOL, _AT_ONCE = 64 << 20, 16 << 20
_FILES = 3


class Tensor(NamedTuple):
    """A tensor of the folder.

    Attributes:
        name, dtype, shape: As in the file.
        spread: Its numbers' standard deviation, or 0: all are 1; of scales the blocks' spread.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: float

    @property
    def nbytes(self) -> int:
        """Returns its size in bytes."""
        return math.prod(self.shape) * (2 if self.dtype == "BF16" else 1)


def tensors_of(c: ModelConfig) -> Iterator[Tensor]:
    """Yields the tensors of a shape of gpt-oss, with a layer's beside each other."""
    assert c.experts is not None
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    num, deep = c.experts.num, (2 * c.num_layers) ** -0.5

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return Tensor(f"{name}.weight", "BF16", (rows, columns), scale * columns**-0.5)

    def vector(name: str, *shape: int, spread: float = 0.1) -> Tensor:
        return Tensor(name, "BF16", shape, spread)

    yield Tensor("model.embed_tokens.weight", "BF16", (c.vocab_size, c.hidden), 1.0)
    for layer in range(c.num_layers):
        at = f"model.layers.{layer}"
        yield vector(f"{at}.input_layernorm.weight", c.hidden, spread=0)
        yield vector(f"{at}.post_attention_layernorm.weight", c.hidden, spread=0)
        rows_of = {"q": heads, "k": kv_heads, "v": kv_heads}
        for name, rows in rows_of.items():
            yield matrix(f"{at}.self_attn.{name}_proj", rows, c.hidden)
            yield vector(f"{at}.self_attn.{name}_proj.bias", rows)
        yield matrix(f"{at}.self_attn.o_proj", c.hidden, heads, deep)
        yield vector(f"{at}.self_attn.o_proj.bias", c.hidden, spread=0.1 * deep)
        yield vector(f"{at}.self_attn.sinks", c.num_heads)
        yield matrix(f"{at}.mlp.router", num, c.hidden)
        yield vector(f"{at}.mlp.router.bias", num)
        for name, rows, columns, scale in (
            ("gate_up_proj", 2 * c.ffn, c.hidden, 1.0),
            ("down_proj", c.hidden, c.ffn, deep),
        ):
            own, spread = f"{at}.mlp.experts.{name}", scale * columns**-0.5
            yield Tensor(f"{own}_blocks", "U8", (num, rows, columns // 32, 16), spread)
            yield Tensor(f"{own}_scales", "U8", (num, rows, columns // 32), spread)
            yield vector(f"{own}_bias", num, rows, spread=0.1 * scale)
    yield vector("model.norm.weight", c.hidden, spread=0)
    yield matrix("lm_head", c.vocab_size, c.hidden)


def config_of(c: ModelConfig) -> dict[str, Any]:
    """Returns config.json, as gpt-oss has it."""
    assert c.experts is not None
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "num_local_experts": c.experts.num,
        "experts_per_token": c.experts.chosen,
        "num_experts_per_tok": c.experts.chosen,
        "sliding_window": c.window,
        "layer_types": [kinds[c.window_of(layer) == 0] for layer in range(c.num_layers)],
        "attention_bias": True,
        "swiglu_limit": c.swiglu_limit,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.context,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"original_max_position_embeddings": 4096, "truncate": False},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "quantization_config": {"quant_method": "mxfp4"},
    }


def write(folder: Path, config: ModelConfig, seed: int = 0) -> int:
    """Writes the folder. Returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(config)))
    tensors = [*tensors_of(config)]
    total = sum(each.nbytes for each in tensors)
    files: list[list[Tensor]] = [[] for _ in range(_FILES)]
    done = 0
    for each in tensors:
        files[min(_FILES - 1, done * _FILES // total)].append(each)
        done += each.nbytes
    rng = np.random.default_rng(seed)
    pools = _Pools(rng)
    index: dict[str, str] = {}
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as threads:
        jobs: list[Callable[[], None]] = []
        for number, some in enumerate(files, 1):
            name = f"model-{number:05}-of-{_FILES:05}.safetensors"
            index |= dict.fromkeys((each.name for each in some), name)
            jobs += _jobs(folder / name, some, pools)
        list(threads.map(lambda job: job(), jobs))
    told = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    return total


class _Pools:
    """Random bytes, and random numbers near 1 in BF16, from which all tensors are copied."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.bytes = rng.integers(0, 256, _POOL, np.uint8)
        normal = rng.standard_normal(_POOL // 32, np.float32)
        self.numbers = np.tile(normal, 16)

    def of(self, tensor: Tensor) -> NDArray[np.uint8]:
        """Returns bytes that are repeated as a tensor's."""
        if tensor.dtype == "BF16":
            size = min(len(self.numbers), math.prod(tensor.shape))
            numbers = self.numbers[:size] * tensor.spread if tensor.spread else np.ones(size)
            return numbers.astype(ml_dtypes.bfloat16).view(np.uint8)
        if tensor.name.endswith("_blocks"):
            return self.bytes
        return (drawn(0, tensor.spread).scale + self.bytes % SCALES).astype(np.uint8)


def _jobs(file: Path, tensors: Sequence[Tensor], pools: _Pools) -> Iterator[Callable[[], None]]:
    """Writes a file's header. Yields a function for each tensor, which writes that."""
    at, header = 0, {}
    for each in tensors:
        offsets = [at, at + each.nbytes]
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": offsets}
        at += each.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    file.write_bytes(head)
    os.truncate(file, len(head) + at)

    def job(tensor: Tensor, number: int, start: int) -> None:
        pool = pools.of(tensor)
        with open(file, "r+b", buffering=0) as opened:
            opened.seek(start)
            left, begin = tensor.nbytes, 4096 * number % max(1, len(pool) // 2)
            while left:
                some = pool.data[begin : begin + min(left, _AT_ONCE)]
                left -= opened.write(some)
                begin = (begin + len(some)) % max(1, len(pool) - 1) & ~1

    at = len(head)
    for number, each in enumerate(tensors):
        yield partial(job, each, number, at)
        at += each.nbytes


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", help="gpt-oss-20b or gpt-oss-120b; :2 behind it leaves 2 layers")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    config = shape_of(args.shape)
    if config.family != "gpt_oss":
        raise kccl.InvalidArgument(f"shape is {args.shape!r}, must be one of gpt-oss")
    print(f"{args.folder}: {write(args.folder, config) / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
