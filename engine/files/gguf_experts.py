"""Reads mixtures of experts in GGUF files: their keys, and each expert's part of the tensors that
hold a matrix of all experts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import kccl

from ..base.fields import Fields
from ..formats.base import Stored
from ..model.config import ModelConfig
from ..model.experts import MOST_CHOSEN, MOST_EXPERTS, Experts
from .gguf_parts import GgufParts

OF_EXPERT = ", expert "
"""The name of an expert's part is the tensor's name, this string, and the expert's number."""
MIXTURES = {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""GGUF's architecture -> ModelConfig.family, for architectures with experts."""
# gpt-oss's swiglu_limit. It belongs to the architecture, and GGUF has no key for it.
_GPT_OSS_LIMIT = 7.0
# Some files have gate and up in one tensor of this name. The gate's rows come first.
_BOTH = "blk.{}.ffn_gate_up_exps.{}"
_HALVES = {"w1": 0, "w3": 1, "b1": 0, "b3": 1}


class Part(NamedTuple):
    """A matrix or a bias of one expert, within a tensor of all experts.

    Attributes:
        tensor: The name of the tensor that holds the matrices or biases of all experts.
        expert: The expert's number.
        shape: The part's shape.
        first: The part's first row within the expert's rows of the tensor.
    """

    tensor: str
    expert: int
    shape: tuple[int, ...]
    first: int = 0


def experts(fields: Fields, family: str, num_layers: int) -> dict[str, Any]:
    """Returns the fields of ModelConfig that only mixtures have. Returns {} for other
    architectures.

    Raises:
        kccl.Error: A key is missing or wrong; the text names it.
    """
    if family not in MIXTURES:
        return {}
    most, numbers = MOST_EXPERTS, []
    for key in ("expert_count", "expert_used_count"):
        numbers.append(fields.integer(f"{family}.{key}", least=1))
        if numbers[-1] > most:
            raise fields.wrong(f"{family}.{key}", f"at most {most}")
        most = min(MOST_CHOSEN, numbers[0])
    num, chosen = numbers
    # llama.cpp always normalises the chosen experts' weights in these architectures, whatever the
    # file says. So is_normalised keeps its default, True.
    found: dict[str, Any] = {"experts": Experts(num=num, chosen=chosen)}
    if family == "gpt-oss":
        found |= {"has_sinks": True, "swiglu_limit": _GPT_OSS_LIMIT}
        pattern = f"{family}.attention.sliding_window_pattern"
        if fields.value(pattern) not in (None, 2):
            raise fields.wrong(pattern, "absent or 2: every other layer has the window")
        found["window"] = fields.integer(f"{family}.attention.sliding_window", least=1)
        found["window_layers"] = tuple(range(0, num_layers, 2))
    return found


def parts_of(config: ModelConfig, names: Mapping[str, str], file: GgufParts) -> dict[str, Part]:
    """Returns all experts' parts by their names in `names`. The file has no tensors of these names.
    Leaves out parts whose tensor is missing.

    Args:
        config: The model's configuration.
        names: Tensor of ModelConfig.shapes() -> its name in the file.
        file: The file.

    Raises:
        kccl.Error: A tensor has another number of experts than the configuration.
    """
    found = {}
    num = config.experts.num if config.experts else 0
    for own in config.shapes():
        layer, is_expert, rest = own.partition(".experts.")
        if not is_expert:
            continue
        number, _, part = rest.partition(".")
        tensor, _, _ = names[own].partition(OF_EXPERT)
        both = _BOTH.format(layer.removeprefix("layers."), tensor.rpartition(".")[2])
        is_half = tensor not in file.tensors and part in _HALVES and both in file.tensors
        held = file.tensors.get(both if is_half else tensor)
        if held is None:
            continue
        if len(held.shape) < 2 or held.shape[0] != num:
            raise kccl.Error(
                f"{file.file_of(held.name)}: tensor {held.name} has shape {list(held.shape)}, must "
                f"have {num} experts by the model's configuration"
            )
        _, rows, *rest_of = held.shape
        if is_half and rows % 2:
            told = f"tensor {held.name} has {rows} rows, must have as many of the gate as of up"
            raise kccl.Error(f"{file.file_of(held.name)}: {told}")
        half = rows // 2 if is_half else rows
        first = _HALVES[part] * half if is_half else 0
        found[names[own]] = Part(held.name, int(number), (half, *rest_of), first)
    return found


def read_part(file: GgufParts, part: Part, start: int, stop: int) -> Stored:
    """Reads the rows from start to stop - 1 of a matrix, or such elements of a bias. Returns them
    in their stored format, in new memory.

    Raises:
        kccl.Error: The file cannot be read.
    """
    _, *shape = file.tensors[part.tensor].shape
    if len(shape) == 1:
        read = file.read(part.tensor, part.expert, part.expert + 1)
        return Stored(read.format, read.words[0, start:stop].copy())
    before = part.expert * shape[0] + part.first
    return file.read_rows(part.tensor, before + start, before + stop)
