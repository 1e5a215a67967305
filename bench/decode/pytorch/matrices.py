"""A rank's matrices in PyTorch: in 16 bits, or in 8 and 4 with a scale for a group of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

import kccl
from kccl.engine.formats.base import Plain, Stored
from kccl.engine.formats.e4m3 import E4M3
from kccl.engine.formats.groups import Groups
from kccl.engine.formats.int4 import INT4, ZERO
from kccl.engine.formats.int8 import INT8

_DTYPES = (E4M3, torch.float8_e4m3fn), (INT8, torch.int8), (INT4, torch.uint8)


class Grouped(NamedTuple):
    """Matrices in FP8, INT8 or int4.

    Attributes:
        weights: [lanes, rows, groups, bytes of a group]. Its dtype is that of the numbers. uint8
            stands for int4, of which a byte has two (engine/formats/int4.py).
        scales: FP32 [lanes, rows, groups, 1].
    """

    weights: Tensor
    scales: Tensor

    def split(self) -> tuple[Tensor, ...]:
        """Returns the numbers without scales: FP32 [lanes, rows, groups, columns], or for int4 the
        lower and the upper halves of the bytes, each [lanes, rows, groups, blocks, 16].
        """
        if self.weights.dtype is not torch.uint8:
            return (self.weights.float(),)
        blocks = self.weights.unflatten(-1, (-1, 16))
        return (blocks & 15).float() - ZERO, (blocks >> 4).float() - ZERO

    def values(self) -> Tensor:
        """Returns the weights as FP32 [lanes, rows, columns]."""
        parts = self.split()
        numbers = parts[0] if len(parts) == 1 else torch.stack(parts, -2).flatten(-3)
        return (numbers * self.scales).flatten(2)


Matrix: TypeAlias = "Tensor | Grouped"


def on_device(stored: Stored, device: torch.device, dtype: torch.dtype) -> Matrix:
    """Copies a tensor of a checkpoint to a device. Weights of 16 bits become `dtype`.

    Raises:
        kccl.Error: PyTorch's peer does not multiply the format.
    """
    given = stored.format
    if isinstance(given, Plain):
        bits = torch.from_numpy(stored.words.view(np.int16))
        words: Tensor = bits.view(getattr(torch, given.name))
        return words.to(device, dtype)
    for formats, numbers in _DTYPES:
        if isinstance(given, Groups) and given in formats:
            weights, scales = given.apart(stored.words)
            return Grouped(
                torch.from_numpy(weights).to(device).view(numbers),
                torch.from_numpy(scales).to(device),
            )
    raise kccl.Error(f"it does not multiply {given.in_files}")


def values_of(matrix: Matrix) -> Tensor:
    """Returns a matrix as numbers, [lanes, rows, columns]."""
    return matrix.values() if isinstance(matrix, Grouped) else matrix


def changed(matrix: Matrix, change: Callable[[Tensor], Tensor]) -> Matrix:
    """Changes the order of lanes and rows, which all tensors of a matrix have."""
    return Grouped(*map(change, matrix)) if isinstance(matrix, Grouped) else change(matrix)


def stacked(matrices: Sequence[Any]) -> Matrix:
    """Puts matrices of one format, [lanes, rows, ...], below each other."""
    if isinstance(matrices[0], Grouped):
        return Grouped(*(torch.cat(each, 1).contiguous() for each in zip(*matrices, strict=True)))
    return torch.cat(list(matrices), 1).contiguous()
