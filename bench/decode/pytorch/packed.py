"""Keeps matrices in MXFP4 in PyTorch, so that the experts of a large mixture fit into one GPU.

A product converts the weights to floats. torch.compile makes one loop of the conversion and the
product, so a product reads 4.25 bits a weight.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# A number of e2m1 becomes FP16 by shifts: its exponent goes to FP16's lowest exponent bits, and its
# mantissa to FP16's highest mantissa bit. The result is 2^-14 times the number, so scales are
# multiplied by 2^14.
_SIGN_TO, _REST_TO, _EXPONENT = 12, 9, 14
_HALF, _FP32_AT = 16, 23


class Packed(NamedTuple):
    """Matrices in MXFP4 (engine/formats/mxfp4.py).

    Attributes:
        codes: uint8 [..., rows, blocks, 16]. Byte i has columns i and i + 16 of a block.
        scales: uint8 [..., rows, blocks].
    """

    codes: Tensor
    scales: Tensor

    def of(self, ids: int | Tensor) -> Packed:
        """Returns some of the matrices."""
        return Packed(self.codes[ids], self.scales[ids])

    def values(self) -> Tensor:
        """Returns the weights as FP32 [..., rows, columns]."""
        # Without a compiler, a table takes the fewest passes.
        numbers = _pairs(self.codes.device)[self.codes.int()].transpose(-1, -2).flatten(-2)
        return (numbers * _factors(self.scales)[..., None]).flatten(-2)

    def times(self, x: Tensor) -> Tensor:
        """Returns the products with x, FP32 [columns] or one vector for each matrix."""
        low, high = x[..., None, :].unflatten(-1, (-1, 2, _HALF)).unbind(-2)
        sums = _numbers(self.codes & 15) * low + _numbers(self.codes >> 4) * high
        return (sums * _factors(self.scales)[..., None]).sum((-2, -1))


@cache
def _pairs(device: torch.device) -> Tensor:
    """Returns 2^-14 times the two numbers of each byte: FP32 [256, 2]."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return torch.stack((_numbers(codes & 15), _numbers(codes >> 4)), -1)


def _numbers(codes: Tensor) -> Tensor:
    """Returns 2^-14 times the numbers of codes of four bits, in FP32."""
    bits = codes.to(torch.int16)
    halves = (bits & 8) << _SIGN_TO | (bits & 7) << _REST_TO
    return halves.view(torch.float16).float()


def _factors(scales: Tensor) -> Tensor:
    """Returns 2^14 times the scales, in FP32."""
    return (scales.to(torch.int32) + _EXPONENT << _FP32_AT).view(torch.float32)
