"""Products that a device makes itself: what it needs for that, and who gives it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..files.blocks import Blocks
from ..files.checkpoint import Checkpoint
from ..files.drawn import Drawn
from ..files.pairs import Pairs
from ..formats.base import Format
from ..formats.mxfp4 import MXFP4, SAFE
from ..formats.nested import Nested
from ..model.ops import KINDS, Rows
from .layout import TILE, Piece

HALF = TILE // 2
"""The rows that a tile has of each of two matrices: first of the gate, then of "up"."""

BLOCKS_BYTES = 16 << 20
"""The most bytes of blocks that NestedPart has, if a row has no more."""


class DrawnProduct(NamedTuple):
    """An expert's product that the device draws: what kernels/draw.cuh takes.

    Attributes:
        nbytes: The bytes of the product.
        rows, lanes, blocks, first, keys, scales, has_two: See there.
    """

    nbytes: int
    rows: int
    lanes: int
    blocks: int
    first: int
    keys: int
    scales: int
    has_two: int


class PairedProduct(NamedTuple):
    """An expert's product that the device converts: what kernels/pair.cuh takes.

    Attributes:
        pairs, scales, rows, lanes, blocks, has_two: See there.
    """

    pairs: NDArray[Any]
    scales: NDArray[Any]
    rows: int
    lanes: int
    blocks: int
    has_two: int


class NestedPart(NamedTuple):
    """Rows of a matrix in blocks of GGUF that the device converts: what kernels/nest.cuh takes.

    Attributes:
        format: Their format in the file.
        blocks: uint8 [rows, words of a row].
        columns, first, group, stride, offset, head: See there.
    """

    format: Format
    blocks: NDArray[Any]
    columns: int
    first: int
    group: int
    stride: int
    offset: int
    head: int


class NestedProduct(NamedTuple):
    """A product whose matrices the device converts from blocks of GGUF.

    Attributes:
        nbytes: The bytes of the product.
        format: Its format.
        parts: The rows of its matrices.
    """

    nbytes: int
    format: Nested
    parts: list[NestedPart]


class Maker(Protocol):
    """What makes products on a device."""

    def draw(self, to: int, product: DrawnProduct) -> None:
        """Draws a product at an address."""

    def pair(self, to: int, pairs: int, product: PairedProduct) -> None:
        """Converts a product to an address. At the address `pairs` lie its pairs, then scales."""

    def nest(self, to: int, blocks: int, form: Nested, part: NestedPart) -> None:
        """Converts rows to their places in a product of a form, which lies at the address `to`. At
        the address `blocks` lie their blocks. Returns when they are converted.
        """


def drawn(checkpoint: Checkpoint, names: Sequence[str], piece: Piece) -> DrawnProduct | None:
    """Returns how the device draws the product of some of an expert's matrices, or None."""
    each = [x for name in names if isinstance(x := checkpoint.drawn(name), Drawn)]
    if len(each) < len(names) or piece.product.format is not MXFP4:
        return None
    product, lanes = piece.product, piece.lanes
    has_two = len(names) > 1
    # Rows of w1 and w3 lie below each other, lane by lane; columns of w2 side by side.
    of_lane = product.rows // len(lanes) // 2 if has_two else product.rows
    keys, scales = (
        sum(getattr(matrix, field) << 32 * i for i, matrix in enumerate(each))
        for field in ("key", "scale")
    )
    blocks, first = product.columns // product.format.block, lanes.start * of_lane
    sizes = product.nbytes, product.rows, product.lanes, blocks
    return DrawnProduct(*sizes, first, keys, scales, int(has_two))


def paired(checkpoint: Checkpoint, names: Sequence[str], piece: Piece) -> PairedProduct | None:
    """Returns how the device converts the product of an expert's matrices, or None. Then it has to
    be read: that also tells whether a large scale makes a number infinite.
    """
    product, lanes, made = piece.product, piece.lanes, checkpoint.drawn(names[0])
    if not isinstance(made, Pairs) or made.step != len(names) or product.format is not MXFP4:
        return None
    blocks = product.columns // product.format.block
    if len(names) > 1:
        first = lanes.start * product.rows // len(lanes)
        pairs, scales = made.read(first, first + product.rows)
    else:
        columns = slice(lanes.start * blocks, lanes.stop * blocks)
        pairs, scales = (each[:, columns] for each in made.read(0, product.rows))
    if scales.max() > SAFE:
        return None
    found = np.ascontiguousarray(pairs), np.ascontiguousarray(scales)
    return PairedProduct(*found, product.rows, product.lanes, blocks, int(len(names) > 1))


def nested(checkpoint: Checkpoint, names: Sequence[str], piece: Piece) -> NestedProduct | None:
    """Returns how the device converts the product of some matrices, or None. Then it has to be
    read: that also tells whether a number is infinite or NaN.
    """
    kind, form, config = KINDS[piece.product.kind], piece.product.format, checkpoint.config
    shapes = config.layer_shapes()
    rows = [shapes[name.rpartition(".")[2]][-2] for name in names]
    columns, lanes = piece.product.columns * piece.product.lanes, piece.lanes
    before = lanes.start * piece.product.columns if kind.ends_module else 0
    parts: list[NestedPart] = []
    for number, name in enumerate(names):
        each = rows[number]
        turned = config.head_dim if number < 2 and not config.rope.is_interleaved else 0
        match kind.rows:
            case Rows.HEADS:
                place = each, sum(rows), sum(rows[:number]), turned
            case Rows.IN_TURN:
                place = HALF, 2 * HALF, number * HALF, 0
            case Rows.ONE:
                place = each, each, 0, 0
        of_lanes = lanes if not kind.ends_module else range(1)
        among = of_lanes.start * each, of_lanes.stop * each
        found = _nested_parts(checkpoint, name, form, among, (before, before + columns), place)
        if found is None:
            return None
        parts += found
    assert isinstance(form, Nested)
    return NestedProduct(piece.product.nbytes, form, parts)


def nested_rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> NestedProduct | None:
    """Returns how the device converts rows of the embedding or the head, or None as nested()."""
    form, num = checkpoint.format_of(name), stop - start
    columns, place = checkpoint.config.hidden, (num, num, 0, 0)
    parts = _nested_parts(checkpoint, name, form, (start, stop), (0, columns), place)
    if parts is None:
        return None
    assert isinstance(form, Nested)
    return NestedProduct(form.bytes_of(num * columns), form, parts)


def _nested_parts(
    checkpoint: Checkpoint,
    name: str,
    form: Format,
    rows: tuple[int, int],
    columns: tuple[int, int],
    place: tuple[int, int, int, int],
) -> list[NestedPart] | None:
    """Reads rows and columns of a matrix as the file stores them, each from the first number to
    before the second. Returns None if the file has no blocks that the form holds, if the columns
    are no whole blocks, or if a number is not finite.

    Args:
        checkpoint, name, form: The matrix, and the form to which it is converted.
        rows, columns: The part of the matrix.
        place: NestedPart's group, stride, offset and head.
    """
    made = checkpoint.drawn(name)
    if not isinstance(made, Blocks) or not isinstance(form, Nested) or not form.holds(made.format):
        return None
    if any(column % made.format.block for column in columns):
        return None
    words = slice(*(made.format.words_of(column) for column in columns))
    (start, stop), parts = rows, []
    at_once = max(1, BLOCKS_BYTES // (words.stop - words.start))
    for first in range(start, stop, at_once):
        blocks = np.ascontiguousarray(made.read(first, min(first + at_once, stop))[:, words])
        if not made.format.is_finite(blocks):
            return None
        parts.append(
            NestedPart(made.format, blocks, columns[1] - columns[0], first - start, *place)
        )
    return parts
