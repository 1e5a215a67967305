"""The layouts of matrices of 4-bit floats: MXFP4 and NVFP4. A byte has two numbers of a row. The
lower four bits are the first number.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ..formats.base import Stored
from ..formats.mxfp4 import MXFP4, Mxfp4
from ..formats.nvfp4 import NVFP4, SCALED, Nvfp4
from .hf_files import E4M3, E8M0
from .quantized import QuantizedMatrix


class Mxfp4Matrix(QuantizedMatrix):
    """MXFP4 as compressed-tensors stores it: `weight_packed`, and a byte per 32 columns of a row
    that is their scale.
    """

    def _forms(self) -> Sequence[Mxfp4]:
        return (MXFP4,)

    def _check(self) -> list[str]:
        rows, columns = self.shape
        names = [f"{self._layer}.{each}" for each in ("weight_packed", *self._scheme.scale)]
        for name, per_number, dtypes in (
            (names[0], 2, ("U8",)),
            (names[1], MXFP4.block, ("U8", E8M0)),
        ):
            self._tensors.check(name, dtypes, (rows, -(-columns // per_number)))
        self._scale = names[1]
        return names

    def read(self, start: int, stop: int) -> Stored:
        blocks, scales = (
            self._tensors.read(name, slice(start, stop)).view(np.uint8)
            for name in (self.main, self._scale)
        )
        of_blocks = blocks.reshape(*scales.shape, MXFP4.block // 2)
        return Stored(MXFP4, MXFP4.from_pairs(of_blocks, scales))


class Nvfp4Matrix(QuantizedMatrix):
    """NVFP4 as compressed-tensors stores it: `weight_packed`, an e4m3 scale per 16 columns of a
    row, and one number by which all scales are divided.
    """

    _numbers, _factor, _divides = "weight_packed", "weight_global_scale", True

    def _forms(self) -> Sequence[Nvfp4]:
        return NVFP4

    def _check(self) -> list[str]:
        rows, columns = self.shape
        names = [
            f"{self._layer}.{each}" for each in (self._numbers, *self._scheme.scale, self._factor)
        ]
        main, self._scale, factor = names
        self._tensors.check(main, ("U8",), (rows, -(-columns // 2)))
        self._tensors.check(self._scale, (E4M3,), (rows, -(-columns // SCALED)))
        self._tensors.check(factor, ("F32",), (), (1,))
        one = self._checked(factor, self._tensors.read(factor).reshape(-1))[0]
        self._of_all = np.float32(1) / one if self._divides else one
        return names

    def read(self, start: int, stop: int) -> Stored:
        pairs, scales = (
            self._tensors.read(name, slice(start, stop)).view(np.uint8)
            for name in (self.main, self._scale)
        )
        self._checked(self._scale, scales.view(ml_dtypes.float8_e4m3fn))
        assert isinstance(self.format, Nvfp4)
        return Stored(self.format, self.format.joined(pairs, scales, self._of_all))


class Modelopt4Matrix(Nvfp4Matrix):
    """NVFP4 as ModelOpt stores it: with other names, and scales are multiplied by the number."""

    _numbers, _factor, _divides = "weight", "weight_scale_2", False
