"""The interface of a quantised matrix: a file has its numbers, scales and zero points as separate
tensors, and read() joins them to rows of a format (formats/).

A scale that many rows or columns share is repeated for each group of columns. So some rows, or some
lanes of them, can be read alone. quantized_layouts.py has the layouts of the tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..formats.base import Format, Stored
from ..formats.e4m3 import MOST
from ..formats.groups import Groups
from .hf_files import E8M0
from .schemes import SMALLEST_GROUP, Scheme
from .tensors import Tensors

_FLOATS = ("BF16", "F16", "F32")
_SCALES = (*_FLOATS, E8M0)
# A layer's tensors for rounding activations. The engine does not round them, so it ignores these.
_OF_ACTIVATIONS = (
    "activation_scale",
    "input_global_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
)


class QuantizedMatrix(ABC):
    """A matrix whose numbers, scales and perhaps zero points are separate tensors.

    Attributes:
        shape: Its rows and columns.
        format: The format of the rows that read() returns.
        main: The name of the tensor with the numbers.
        uses: The names of all tensors that belong to it.
    """

    def __init__(
        self,
        tensors: Tensors,
        layer: str,
        scheme: Scheme,
        shape: tuple[int, int],
        columns_of_lane: int,
    ) -> None:
        """Checks the tensors' dtypes and shapes.

        Args:
            tensors: The folder's tensors.
            layer: The layer's name in the folder, before ".weight".
            scheme: How the matrix is stored.
            shape: The shape that the configuration gives it.
            columns_of_lane: The columns of a lane. The format gets the largest groups that divide
                these; if no size does, the smallest groups.

        Raises:
            kccl.Error: A tensor is missing, or has another dtype or shape.
        """
        self.shape, self._tensors, self._layer, self._scheme = shape, tensors, layer, scheme
        rows, columns = shape
        self._rows = scheme.rows or rows
        self._columns = scheme.columns or columns
        self._grid = -(-rows // self._rows), -(-columns // self._columns)
        self.main, *others = self._check()
        unused = {f"{layer}.{each}" for each in _OF_ACTIVATIONS} & tensors.held.keys()
        self.uses = {self.main, *others} | unused
        if columns % SMALLEST_GROUP:
            told = f"{columns} columns, must have a multiple of {SMALLEST_GROUP} to be quantised"
            raise tensors.wrong(self.main, told)
        forms = self._forms()
        fits = (
            each
            for each in forms
            if self._columns % each.block
            == columns % each.block
            == columns_of_lane % each.block
            == 0
        )
        self.format = next(fits, forms[-1])

    @property
    def _groups(self) -> Groups:
        """Returns `format`, which must have groups of columns."""
        assert isinstance(self.format, Groups)
        return self.format

    @abstractmethod
    def _forms(self) -> Sequence[Format]:
        """Returns the formats that the matrix can have, the largest groups first."""

    @abstractmethod
    def _check(self) -> list[str]:
        """Checks the tensors, and returns their names. That of the numbers comes first."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Stored:
        """Reads the rows from start to stop - 1. Returns them in `format`, in new memory.

        Raises:
            kccl.Error: A file cannot be read, or a tensor has numbers that it must not have.
        """

    def take_bias(self) -> None:
        """Ignores the layer's bias if the file has one. Must be called if the model has no bias
        here: AutoGPTQ writes one of zeros for each layer.

        Raises:
            kccl.Error: The bias is not all 0, or has a wrong dtype or shape.
        """
        name = f"{self._layer}.bias"
        if name not in self._tensors.held:
            return
        self._tensors.check(name, _FLOATS, (self.shape[0],))
        if self._tensors.read(name).any():
            raise self._tensors.wrong(name, "a bias that is not 0, and the model has none")
        self.uses.add(name)

    def _check_scale(self, *shapes: tuple[int, ...]) -> str:
        """Checks the tensor of scales, and returns its name."""
        names = [f"{self._layer}.{each}" for each in self._scheme.scale]
        name = next((each for each in names if each in self._tensors.held), names[0])
        self._tensors.check(name, _SCALES, *shapes)
        return name

    def _shapes_of_grid(self) -> list[tuple[int, ...]]:
        """Returns the shapes that a tensor of scales, or of zero points, may have."""
        rows, columns = self._grid
        shapes: list[tuple[int, ...]] = [(rows, columns)]
        if columns == 1:
            shapes.append((rows,))
        if rows == columns == 1:
            shapes.append(())
        return shapes

    def _checked(self, name: str, scales: NDArray[Any]) -> NDArray[np.float32]:
        """Returns scales in FP32. Raises kccl.Error unless all are above 0 and small enough that no
        weight overflows. A scale of 0 would make all weights of its group 0.
        """
        if self._tensors.held[name][0] == E8M0:
            scales = scales.view(ml_dtypes.float8_e8m0fnu)
        with np.errstate(all="ignore"):
            exact = scales.astype(np.float32)
            is_fine = (exact > 0) & np.isfinite(exact * np.float32(MOST))
        if not is_fine.all():
            value = float(exact[~is_fine].flat[0])
            most = float(np.finfo(np.float32).max) / MOST
            told = f"the scale {value:g}, must be above 0 and at most {most:.3g}"
            raise self._tensors.wrong(name, told)
        return exact

    def _rows_of_grid(self, start: int, stop: int) -> slice:
        """Returns which rows of the grid the matrix's rows from start to stop - 1 need. The grid
        has a scale for each block of rows and columns.
        """
        return slice(start // self._rows, -(-stop // self._rows))

    def _of_groups(self, of_grid: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Repeats scales or zero points, of which the file has one for each block of rows and
        columns (the grid), so that each group of a row has one: [rows, groups].

        Args:
            of_grid: The numbers of _rows_of_grid(start, stop): [rows, columns of the grid].
            start, stop: The matrix's rows from start to stop - 1.
        """
        rows = np.arange(start, stop) // self._rows - start // self._rows
        columns = np.arange(0, self.shape[1], self.format.block) // self._columns
        return of_grid[rows[:, None], columns]

    def _check_order(self, name: str) -> None:
        """Checks by the tensor `name` (g_idx) that the columns of each group are consecutive. The
        engine does not support others, for which it would have to permute the vector.
        """
        self._tensors.check(name, ("I32",), (self.shape[1],))
        wanted = np.arange(self.shape[1]) // self._columns
        if not np.array_equal(self._tensors.read(name), wanted):
            raise self._tensors.wrong(
                name,
                "groups whose columns do not lie side by side: quantise without desc_act, or with "
                "actorder 'weight'",
            )
