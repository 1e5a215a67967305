"""Reads matrices of experts into PyTorch. Random ones in MXFP4 are drawn on the device, by another
text than the engine's (engine/files/drawn.py has the rule).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.drawn import FIRST, SCALES, SECOND, WORDS, Drawn
from kccl.engine.formats import e2m1
from kccl.engine.formats.mxfp4 import MXFP4

from .matrices import on_device, values_of
from .packed import Packed

_BIAS = 127


def expert_matrix(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Returns a matrix of an expert in FP32. shape: its lanes, rows and columns."""
    if isinstance(matrix := checkpoint.drawn(name), Drawn):
        return _drawn(matrix, shape, device)
    return values_of(on_device(checkpoint.read(name), device, torch.float32))


def beside(matrix: Tensor) -> Tensor:
    """Puts the lanes of a matrix, [lanes, rows, columns, ...], side by side."""
    return matrix.transpose(0, 1).flatten(1, 2)


def packed_matrix(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], device: torch.device
) -> Packed | None:
    """Returns a matrix of an expert as it is stored, [lanes, rows, ...]; None: not in MXFP4."""
    if isinstance(matrix := checkpoint.drawn(name), Drawn):
        codes, scales = _blocks(matrix, math.prod(shape) // MXFP4.block, device)
        codes, scales = codes.to(torch.uint8), scales.to(torch.uint8)
    elif checkpoint.format_of(name) is MXFP4:
        words = torch.from_numpy(checkpoint.read(name).words).to(device)
        blocks = words.view(-1, MXFP4.words)
        codes, scales = blocks[:, 1:].contiguous(), blocks[:, 0].contiguous()
    else:
        return None
    return Packed(codes.view(*shape[:2], -1, codes.shape[-1]), scales.view(*shape[:2], -1))


def _drawn(matrix: Drawn, shape: tuple[int, ...], device: torch.device) -> Tensor:
    codes, scales = _blocks(matrix, math.prod(shape) // MXFP4.block, device)
    numbers = torch.tensor(e2m1.NUMBERS, dtype=torch.float32, device=device)
    values = numbers[torch.cat((codes & 15, codes >> 4), 1).long()]
    return (values * torch.exp2((scales - _BIAS).float())[:, None]).view(shape)


def _blocks(matrix: Drawn, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the bytes of all blocks, int32 [num, 16], and their scales, int64 [num]."""
    words = torch.arange(WORDS * num, dtype=torch.int32, device=device)
    words = _mixed(_mixed(words) + _signed(matrix.key)).view(num, WORDS)
    bits = words[:, :4, None] >> torch.arange(0, 32, 8, dtype=torch.int32, device=device)
    return (bits & 255).flatten(1), (words[:, 4].long() & 0xFFFFFFFF) % SCALES + matrix.scale


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _shifted(words: Tensor, num: int) -> Tensor:
    """Shifts words of 32 bits, int32, to the right, without their sign."""
    return words >> num & (1 << 32 - num) - 1


def _mixed(words: Tensor) -> Tensor:
    words = words ^ _shifted(words, 16)
    words = words * _signed(FIRST)
    words = words ^ _shifted(words, 15)
    words = words * _signed(SECOND)
    return words ^ _shifted(words, 16)
