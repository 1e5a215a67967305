"""The layouts of quantised matrices: those of transformers, compressed-tensors, AWQ and GPTQ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.base import Stored
from ..formats.e4m3 import E4M3
from ..formats.groups import Groups
from ..formats.int4 import INT4, INT4_ZEROS, halved
from ..formats.int8 import INT8, INT8_ZEROS
from ..model.config import ModelConfig, is_vector
from .float4_layouts import Modelopt4Matrix, Mxfp4Matrix, Nvfp4Matrix
from .hf_files import DTYPES as PLAIN_DTYPES
from .hf_files import E4M3 as E4M3_DTYPE
from .hf_files import E8M0 as E8M0_DTYPE
from .hf_files import wrong_dtype
from .quantized import QuantizedMatrix
from .schemes import Layout, Quantization, Scheme
from .source import CUT_AXIS
from .tensors import Tensors

DTYPES = (E4M3_DTYPE, E8M0_DTYPE, "I8", "U8", "I32", "I64")
"""The dtypes of quantised matrices' tensors, besides the dtypes of 16 and 32 bits."""
_WORD_BITS = 32
# Bits of an integer -> a word that has a 1 in each of its integers. Added to another word, it adds
# 1 to each of that word's integers.
_ONES = {4: 0x11111111, 8: 0x01010101}
# The columns, from 0 to 7, of the 8 integers of a word in AWQ's layout. The integer in the lowest
# bits comes first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# How many rows of a matrix are unpacked at a time, to save memory. A multiple of 8, because AWQ's
# words have integers of 8 rows.
_ROWS_AT_ONCE = 512
# The rows and columns of a block, if config.json does not say.
_BLOCK = 128
# XOR with this bit adds 128 to an 8-bit integer, so that none is negative.
_SIGN = np.uint8(0x80)


class _Rows(QuantizedMatrix):
    """A matrix whose tensors have a row for each of its rows, and scales in the same order."""

    def _check_names(self, numbers: str, dtype: str, columns: int) -> list[str]:
        main = f"{self._layer}.{numbers}"
        self._tensors.check(main, (dtype,), (self.shape[0], columns))
        self._scale = self._check_scale(*self._shapes_of_grid())
        return [main, self._scale]

    def _scales(self, start: int, stop: int) -> NDArray[np.float32]:
        read = self._of_grid(self._scale, self._rows_of_grid(start, stop))
        return self._of_groups(self._checked(self._scale, read), start, stop)

    def _of_grid(self, name: str, rows: slice) -> NDArray[Any]:
        """Reads from a tensor of scales or zero points those of some rows of the grid. The grid has
        a number for each block of rows and columns that share it.
        """
        has_rows = bool(self._tensors.held[name][1])
        read = self._tensors.read(name, *([rows] if has_rows else []))
        return read.reshape(-1, self._grid[1])


class _Bytes(_Rows):
    """8-bit floats or integers in `weight`, with scales. Integers may have zero points. If the
    scheme has none, older files have them nevertheless, and all must be 0.
    """

    def _forms(self) -> Sequence[Groups]:
        if self._scheme.layout is Layout.E4M3:
            return E4M3
        return INT8_ZEROS if self._scheme.has_zeros else INT8

    def _check(self) -> list[str]:
        dtype = E4M3_DTYPE if self._scheme.layout is Layout.E4M3 else "I8"
        names = self._check_names("weight", dtype, self.shape[1])
        self._zero = f"{self._layer}.weight_zero_point"
        has_zeros = self._scheme.has_zeros
        if has_zeros or self._zero in self._tensors.held:
            dtypes = ("I8",) if has_zeros else (E4M3_DTYPE, "I8")
            self._tensors.check(self._zero, dtypes, *self._shapes_of_grid())
            if not has_zeros and self._of_grid(self._zero, slice(None)).any():
                raise self._tensors.wrong(self._zero, "a zero point that is not 0")
            names.append(self._zero)
        return names

    def read(self, start: int, stop: int) -> Stored:
        read = self._tensors.read(self.main, slice(start, stop)).view(np.uint8)
        scales, zeros = self._scales(start, stop), None
        if self._scheme.has_zeros:
            read = read ^ _SIGN
            of_grid = self._of_grid(self._zero, self._rows_of_grid(start, stop))
            zeros = self._of_groups(of_grid.view(np.uint8) ^ _SIGN, start, stop)
        return Stored(self.format, self._groups.joined(read, scales, zeros))


class _Packed(_Rows):
    """compressed-tensors' `weight_packed`: words of 32 bits with 8 or 4 integers of a row. The
    first integer has the lowest bits. Half of the range, 8 or 128, was added to each, so that none
    is negative.
    """

    @property
    def _bits(self) -> int:
        return 4 if self._scheme.layout is Layout.PACKED4 else 8

    def _forms(self) -> Sequence[Groups]:
        if self._scheme.has_zeros:
            return INT8_ZEROS if self._bits == 8 else INT4_ZEROS
        return INT8 if self._bits == 8 else INT4

    def _check(self) -> list[str]:
        rows, columns = self.shape
        names = self._check_names("weight_packed", "I32", -(-columns * self._bits // 32))
        shape, order = f"{self._layer}.weight_shape", f"{self._layer}.weight_g_idx"
        if shape in self._tensors.held:
            self._tensors.check(shape, ("I64", "I32"), (2,))
            if (found := self._tensors.read(shape).tolist()) != [rows, columns]:
                raise self._tensors.wrong(shape, f"{found}, must have {[rows, columns]}")
            names.append(shape)
        if order in self._tensors.held:
            self._check_order(order)
            names.append(order)
        if self._scheme.has_zeros:
            self._zero = f"{self._layer}.weight_zero_point"
            grid_rows, grid_columns = self._grid
            in_words = -(-grid_rows * self._bits // _WORD_BITS)
            self._tensors.check(self._zero, ("I32",), (in_words, grid_columns))
            names.append(self._zero)
        return names

    def read(self, start: int, stop: int) -> Stored:
        words = self._tensors.read(self.main, slice(start, stop))
        scales = self._scales(start, stop)
        # The words are stored as little-endian. So the byte view has each word's integers in column
        # order, the lowest bits first.
        read: NDArray[np.uint8] = np.ascontiguousarray(words, "<i4").view(np.uint8)
        zeros = self._zeros(start, stop) if self._scheme.has_zeros else None
        if self._bits == 4:
            integers = np.stack([read & 15, read >> 4], axis=-1).reshape(len(read), -1)
            read = halved(integers)
        elif zeros is None:
            read = read ^ _SIGN
        return Stored(self.format, self._groups.joined(read, scales, zeros))

    def _zeros(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Returns the zero points of some rows' groups. A word has those of 8 or 4 rows."""
        rows, in_word = self._rows_of_grid(start, stop), _WORD_BITS // self._bits
        first = rows.start // in_word
        words = self._tensors.read(self._zero, slice(first, -(-rows.stop // in_word)))
        zeros = _unpacked(words.T, self._bits).T
        own = zeros[rows.start - first * in_word : rows.stop - first * in_word]
        return self._of_groups(own, start, stop)


class _Transposed(QuantizedMatrix):
    """AWQ's and GPTQ's `qweight`, `qzeros` and `scales`. They are transposed: a column of them is a
    row of the matrix. So read() reads the whole matrix, and keeps it until another one is read.
    """

    @property
    def _bits(self) -> int:
        return 8 if self._scheme.layout is Layout.GPTQ8 else 4

    def _forms(self) -> Sequence[Groups]:
        return INT8_ZEROS if self._bits == 8 else INT4_ZEROS

    def _check(self) -> list[str]:
        (rows, columns), groups = self.shape, self._grid[1]
        is_gptq, in_word = self._scheme.layout is not Layout.AWQ, _WORD_BITS // self._bits
        main, self._zero = f"{self._layer}.qweight", f"{self._layer}.qzeros"
        in_words = -(-columns // in_word), -(-rows // in_word)
        self._tensors.check(
            main, ("I32",), (in_words[0], rows) if is_gptq else (columns, in_words[1])
        )
        self._tensors.check(self._zero, ("I32",), (groups, in_words[1]))
        self._scale = self._check_scale((groups, rows))
        if rows % in_word:
            raise self._tensors.wrong(main, f"{rows} rows, must have a multiple of {in_word}")
        names, order = [main, self._zero, self._scale], f"{self._layer}.g_idx"
        if is_gptq and order in self._tensors.held:
            self._check_order(order)
            names.append(order)
        return names

    def read(self, start: int, stop: int) -> Stored:
        whole = self._tensors.kept(self.main, self._read_all)
        return Stored(self.format, whole[start:stop].copy())

    def _read_all(self) -> NDArray[np.uint8]:
        rows, columns = self.shape
        words, of_zeros = self._tensors.read(self.main), self._tensors.read(self._zero)
        scales = self._checked(self._scale, self._tensors.read(self._scale)).T
        is_awq, bits = self._scheme.layout is Layout.AWQ, self._bits
        order = _AWQ_ORDER if is_awq else None
        # The layout "gptq" stores zero points minus 1, subtracted from the whole word, so that a
        # zero point of 0 borrows from the next one. Adding 1s to the whole word undoes this.
        offset = np.uint32(_ONES[bits] * self._scheme.zero_offset)
        zeros = _unpacked(of_zeros.view(np.uint32) + offset, bits, order).T
        found = np.empty((rows, self.format.words_of(columns)), np.uint8)
        for start in range(0, rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, rows)
            if is_awq:
                some = words[:, start * bits // _WORD_BITS : stop * bits // _WORD_BITS]
                integers = np.ascontiguousarray(_unpacked(some, bits, order).T)
            else:
                integers = _unpacked(words[:, start:stop].T, bits)
            found[start:stop] = self._groups.joined(
                halved(integers) if bits == 4 else integers,
                self._of_groups(scales[start:stop], start, stop),
                self._of_groups(zeros[start:stop], start, stop),
            )
        return found


def _unpacked(
    words: NDArray[Any], bits: int, order: Sequence[int] | None = None
) -> NDArray[np.uint8]:
    """Unpacks integers of 4 or 8 bits from words of 32 bits. Returns [rows, 8 or 4 times the
    columns].

    Args:
        words: [rows, columns].
        bits: The bits of an integer: 4 or 8.
        order: The columns, from 0 to 7, of a word's integers of 4 bits, from the lowest bits on.
            None: 0 to 7.
    """
    # The words are made little-endian, so the byte view has the lowest bits first.
    read = np.ascontiguousarray(words, words.dtype.newbyteorder("<")).view(np.uint8)
    if bits == 8:
        return read.reshape(len(words), -1)
    places = range(8) if order is None else order
    read = read.reshape(*words.shape, 4)
    found = np.empty((*words.shape, 8), np.uint8)
    found[..., places[0::2]] = read & 15
    found[..., places[1::2]] = read >> 4
    return found.reshape(len(words), -1)


_LAYOUTS: dict[Layout, type[QuantizedMatrix]] = {
    Layout.E4M3: _Bytes,
    Layout.INT8: _Bytes,
    Layout.PACKED4: _Packed,
    Layout.PACKED8: _Packed,
    Layout.AWQ: _Transposed,
    Layout.GPTQ: _Transposed,
    Layout.GPTQ8: _Transposed,
    Layout.MXFP4: Mxfp4Matrix,
    Layout.NVFP4: Nvfp4Matrix,
    Layout.MODELOPT4: Modelopt4Matrix,
}


def find_quantized(
    quantization: Quantization,
    tensors: Tensors,
    config: ModelConfig,
    names: Mapping[str, str],
) -> dict[str, QuantizedMatrix]:
    """Returns the quantised matrices of a model by their names in `names`. These end in ".weight",
    even if the folder has no tensor of that name.

    Args:
        quantization: What config.json says.
        tensors: The folder's tensors.
        config: The model's configuration.
        names: Tensor of ModelConfig.shapes() -> its name in the folder.

    Raises:
        kccl.Error: A tensor is missing, or has another dtype or shape than it must have.
    """
    modules = {
        own: _module_of(name)
        for own, name in names.items()
        if not is_vector(own) and own != "embedding"
    }
    quantization.check_targets({*modules.values()})
    of_model = {*names.values()}
    shapes = config.shapes()
    found: dict[str, QuantizedMatrix] = {}
    for own, module in modules.items():
        if (scheme := quantization.scheme_of(module)) is None:
            continue
        dtype, _ = tensors.held.get(names[own], ("", ()))
        if own == "head" and quantization.is_head_open and dtype in PLAIN_DTYPES:
            continue
        # Most files do not quantise the router, and some of these do not list it as an exception.
        # So its dtype decides.
        if own.endswith(".router") and dtype in PLAIN_DTYPES:
            continue
        lanes, *shape = (1, *shapes[own])[-3:]
        columns_of_lane = shape[1]
        shape[CUT_AXIS.get(own.rpartition(".")[2], 0)] *= lanes
        layer = names[own].removesuffix(".weight")
        whole = shape[0], shape[1]
        scheme = _with_blocks(scheme, tensors, layer, whole)
        matrix = _LAYOUTS[scheme.layout](tensors, layer, scheme, whole, columns_of_lane)
        if scheme.layout in (Layout.GPTQ, Layout.GPTQ8) and f"{layer}.bias" not in of_model:
            matrix.take_bias()
        found[names[own]] = matrix
    for name in names.values():
        if name in tensors.held and name not in found:
            dtype = tensors.held[name][0]
            if dtype not in PLAIN_DTYPES:
                raise wrong_dtype(tensors.files[name], name, dtype, PLAIN_DTYPES)
    return found


def _with_blocks(scheme: Scheme, tensors: Tensors, layer: str, shape: tuple[int, int]) -> Scheme:
    """Returns the scheme with blocks of _BLOCK rows and columns, transformers' default, if
    config.json gives none and the tensor of scales has the shape for such blocks.
    """
    if "weight_scale_inv" not in scheme.scale or scheme.rows:
        return scheme
    _, held = tensors.held.get(f"{layer}.weight_scale_inv", ("", None))
    grid = tuple(-(-size // _BLOCK) for size in shape)
    return replace(scheme, rows=_BLOCK, columns=_BLOCK) if held == grid else scheme


def _module_of(name: str) -> str:
    """Returns the module's name in transformers, which config.json uses."""
    module = name.removesuffix(".weight")
    return module if module.startswith(("model.", "lm_head")) else f"model.{module}"
