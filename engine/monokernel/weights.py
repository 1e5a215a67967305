"""Reads a rank's weights in the form in which a kernel packs them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.parts import in_parts
from ..files.checkpoint import Checkpoint
from ..files.source import CUT_AXIS
from ..model.ops import KINDS, Place, Rows
from ..model.program import Op, Program
from ..model.rotations import pair_order
from .layout import TILE, Piece
from .made import (
    HALF,
    DrawnProduct,
    NestedProduct,
    PairedProduct,
    drawn,
    nested,
    nested_rows,
    paired,
)

_ROWS_AT_ONCE = 4096

Progress = Callable[[int], None]
"""A function that is called with the number of bytes packed since its last call."""


Matrix = NDArray[Any] | DrawnProduct | PairedProduct | NestedProduct
"""A matrix in its stored format, [rows, words of a row], or what the device needs to make it."""


def matrices(
    checkpoint: Checkpoint, program: Program, some: Iterable[Piece], *, makes: bool = False
) -> Iterator[tuple[Callable[[], Matrix], int]]:
    """Yields for each piece a function that reads the matrix, and the bytes of the matrix. Several
    threads may call such functions at the same time.

    The lanes of a lane group are stacked; those of a product that ends a module are side by side,
    because its sums go over the lanes.

    Args:
        checkpoint, program: The model.
        some: The pieces: some of those of pieces() for a rank, in their order.
        makes: Whether the device makes products whose words can be drawn or converted.
    """
    c = program.config
    order = pair_order(c.head_dim, is_interleaved=c.rope.is_interleaved)
    op: Op | None = None
    products: tuple[tuple[str, ...], ...] = ()
    for piece in some:
        kind, read = (
            KINDS[piece.product.kind],
            partial(_read_head, checkpoint, program, piece, makes),
        )
        if kind.place is Place.LAYER:
            if op is None or (op.layer, op.kind) != (piece.layer, kind.name):
                op = program.by_name[f"layers.{piece.layer}.{kind.name}"]
                products = op.products()
            names = products[piece.group if kind.has_experts else 0]
            read = partial(_read_or_make, checkpoint, op, names, piece, order, makes)
        yield read, piece.product.nbytes


def _read_or_make(
    checkpoint: Checkpoint,
    op: Op,
    names: Sequence[str],
    piece: Piece,
    order: NDArray[np.intp],
    makes: bool,
) -> Matrix:
    made: Matrix | None = None
    if makes and KINDS[op.kind].has_experts:
        made = drawn(checkpoint, names, piece) or paired(checkpoint, names, piece)
    elif makes and _is_cut(names[0]):
        made = nested(checkpoint, names, piece)
    return made if made is not None else _read_product(checkpoint, op, names, piece, order)


def _read_head(checkpoint: Checkpoint, program: Program, piece: Piece, makes: bool) -> Matrix:
    (name,) = program.by_name[KINDS[piece.product.kind].name].weights
    rows, (cut,) = piece.product.rows, piece.lanes
    return _rows_of(checkpoint, name, cut * rows, (cut + 1) * rows, makes)


def embedding(checkpoint: Checkpoint, program: Program, *, makes: bool = False) -> Matrix:
    """Returns the whole embedding as it is stored, [vocab_size, words of a row], or what the device
    needs to make it.
    """
    return _rows_of(checkpoint, "embedding", 0, program.config.vocab_size, makes)


def _rows_of(checkpoint: Checkpoint, name: str, start: int, stop: int, makes: bool) -> Matrix:
    """Reads rows of the embedding or the head, in several threads if they are many."""
    if makes and (made := nested_rows(checkpoint, name, start, stop)) is not None:
        return made
    first = checkpoint.read_rows(name, start, min(start + _ROWS_AT_ONCE, stop)).words
    out = np.empty((stop - start, *first.shape[1:]), first.dtype)
    out[: len(first)] = first

    def read(done: int) -> None:
        at = len(first) + done
        end = min(at + _ROWS_AT_ONCE, stop - start)
        out[at:end] = checkpoint.read_rows(name, start + at, start + end).words

    in_parts(read, len(out) - len(first), _ROWS_AT_ONCE)
    return out


def biases(checkpoint: Checkpoint, program: Program, lanes: range) -> NDArray[np.float32]:
    """Returns a rank's biases in the order of kernels/biases.cuh, as one float32 vector."""
    c = program.config
    order = pair_order(c.head_dim, is_interleaved=c.rope.is_interleaved)

    def rows(op: Op, names: Sequence[str]) -> NDArray[np.float32]:
        if not _is_cut(names[0]):
            bias = checkpoint.tensor(names[0])
            return np.pad(bias, (0, -len(bias) % TILE))
        # Biases get a column axis, so that the same code orders them and matrices.
        parts = [checkpoint.tensor(name, lanes)[..., None] for name in names]
        return _product_of(op, parts, order)[:, 0]

    found = [rows(op, names) for op in program.ops for names in op.biases_of_products()]
    return np.concatenate([np.empty(0, np.float32), *found])


def sinks(checkpoint: Checkpoint, program: Program, lanes: range) -> dict[str, NDArray[np.float32]]:
    """Returns a rank's attention sinks: tensor -> float32 [lanes, query heads], in the order of the
    layers.
    """
    names = [name for op in program.ops for name in op.sinks()]
    return {name: np.ascontiguousarray(checkpoint.tensor(name, lanes)) for name in names}


def _is_cut(name: str) -> bool:
    """Tells whether a tensor is cut into lanes."""
    return name.rpartition(".")[2] in CUT_AXIS


def _read_product(
    checkpoint: Checkpoint, op: Op, names: Sequence[str], piece: Piece, order: NDArray[np.intp]
) -> NDArray[Any]:
    """Reads the matrices of a piece and returns its product. Does not keep the matrices."""
    if not _is_cut(names[0]):
        (name,) = names
        words = checkpoint.read(name).words
        # Whole tiles of rows.
        return np.pad(words, ((0, piece.product.rows - len(words)), (0, 0)))
    parts = [np.ascontiguousarray(checkpoint.read(name, piece.lanes).words) for name in names]
    return _product_of(op, parts, order)


def _product_of(op: Op, parts: list[NDArray[Any]], order: NDArray[np.intp]) -> NDArray[Any]:
    """Joins an op's matrices, [lanes, rows, columns] each, into one, as OpKind.rows says. `order`
    is the order of a head's rows, from pair_order().
    """
    kind = KINDS[op.kind]
    match kind.rows:
        case Rows.HEADS:
            rows = _below_each_other(parts, order)
        case Rows.IN_TURN:
            rows = _in_turn(parts)
        case Rows.ONE:
            (only,) = parts
            rows = _side_by_side(only) if kind.ends_module else only.reshape(-1, only.shape[2])
    return rows


def _below_each_other(parts: list[NDArray[Any]], order: NDArray[np.intp]) -> NDArray[Any]:
    """Stacks wq, wk and wv, [lanes, rows, columns] each, lane by lane. Reorders the rows of heads
    of wq and wk, so that the two rows of a RoPE pair are neighbours.
    """
    lanes, _, columns = parts[0].shape
    heads = [part.reshape(lanes, -1, len(order), columns) for part in parts]
    heads[:2] = [part[:, :, order] for part in heads[:2]]
    return np.concatenate(heads, axis=1).reshape(-1, columns)


def _in_turn(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Joins two matrices, [lanes, rows, columns] each, into one whose rows alternate: HALF rows of
    the first matrix, then HALF rows of the second.
    """
    halves = [part.reshape(-1, 1, HALF, part.shape[2]) for part in parts]
    return np.concatenate(halves, axis=1).reshape(-1, parts[0].shape[2])


def _side_by_side(tensor: NDArray[Any]) -> NDArray[Any]:
    """Reshapes [lanes, rows, columns] to [rows, lanes * columns]."""
    return np.ascontiguousarray(tensor.swapaxes(0, 1)).reshape(tensor.shape[1], -1)
