"""Gives a rank's weights to the device, which packs them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files.checkpoint import Checkpoint
from ..model.config import is_vector
from ..model.ops import IN_LAYER, KINDS, PRODUCTS, Place, Rows
from ..model.program import Op, Program
from ..model.rotations import pair_order

# Rows of each of two matrices in a tile: of the gate, and of "up" behind them.
_HALF = 8
_ROWS_AT_ONCE = 4096

Progress = Callable[[int], None]
"""Called with the number of bytes that were packed since the last call."""


def matrices(
    checkpoint: Checkpoint, program: Program, lanes: range, rank: int, world_size: int
) -> Iterator[tuple[int, int, int, NDArray[np.uint16]]]:
    """A rank's matrices as the device packs them, one after another.

    Yields:
        The index in ops.PRODUCTS, the layer, the group; and the matrix, uint16 [rows, columns]: a
        group's lanes lie one below the other; side by side where they add to one residual.
    """
    c = program.config
    groups = [lanes] if program.num_residuals == 1 else [range(i, i + 1) for i in lanes]
    order = pair_order(c.head_dim, is_interleaved=c.rope.is_interleaved)
    for op in program.ops:
        if not _matrices_of(op) or KINDS[op.kind].place is not Place.LAYER:
            continue
        for group, those in enumerate(groups):
            product = _read_product(checkpoint, op, those, order)
            yield PRODUCTS.index(op.kind), op.layer, group, product
    (name,) = program.by_name["head"].weights
    has_parts = program.num_head_parts > 1
    cuts = lanes if has_parts else range(rank, rank + 1)
    rows = c.vocab_size // (program.num_head_parts if has_parts else world_size)
    for group, cut in enumerate(cuts):
        head = checkpoint.rows(name, cut * rows, (cut + 1) * rows)
        number = PRODUCTS.index("head")
        yield number, c.num_layers, group, np.ascontiguousarray(head).view(np.uint16)


def embedding(checkpoint: Checkpoint, program: Program) -> NDArray[np.uint16]:
    """The whole table, uint16 [vocab_size, hidden]."""
    c = program.config
    out = np.empty((c.vocab_size, c.hidden), np.uint16)
    for first in range(0, c.vocab_size, _ROWS_AT_ONCE):
        end = min(first + _ROWS_AT_ONCE, c.vocab_size)
        rows = checkpoint.rows("embedding", first, end)
        out[first:end] = np.ascontiguousarray(rows).view(np.uint16)
    return out


def biases(checkpoint: Checkpoint, program: Program, lanes: range) -> NDArray[np.float32]:
    """float32 [...]: a rank's, as kernels/biases.cuh has them."""
    c = program.config
    order = pair_order(c.head_dim, is_interleaved=c.rope.is_interleaved)

    def rows(op: Op) -> NDArray[np.float32]:
        if KINDS[op.kind].ends_module:
            return checkpoint.tensor(op.biases[0])
        # Columns of their own, as a matrix has them.
        parts = [checkpoint.tensor(name, lanes)[..., None] for name in op.biases]
        return _product_of(op, parts, order)[:, 0]

    found = [rows(op) for op in program.ops if op.biases]
    return np.concatenate([np.empty(0, np.float32), *found])


def head_rows(program: Program, world_size: int) -> int:
    """Most rows of the head that a rank has."""
    vocab_size, parts = program.config.vocab_size, program.num_head_parts
    if parts == 1:
        return vocab_size // world_size
    return vocab_size // parts * program.most_lanes(world_size)


def total_bytes(program: Program, rank: int, world_size: int) -> int:
    """Bytes of all matrices that matrices() yields for a rank."""
    c = program.config
    lanes = len(program.lanes_of(rank, world_size))
    layers = c.num_layers * sum(_lane_elements(program).values()) * lanes
    head = c.vocab_size * lanes // c.num_lanes
    if program.num_head_parts == 1:
        head = c.vocab_size // world_size
    return 2 * (layers + c.hidden * head)


def most_bytes(program: Program, world_size: int) -> int:
    """Bytes of the largest matrix that matrices() yields for any rank."""
    c = program.config
    lanes = program.most_lanes(world_size) if program.num_residuals == 1 else 1
    of_layers = max(_lane_elements(program).values()) * lanes
    return 2 * max(of_layers, c.hidden * head_rows(program, world_size))


def _lane_elements(program: Program) -> dict[str, int]:
    """A layer's products -> the elements of their matrices for one lane."""
    shapes = program.config.layer_shapes()
    return {
        kind.name: sum(math.prod(shapes[name][1:]) for name in kind.matrices)
        for kind in IN_LAYER
        if kind.is_product
    }


def _matrices_of(op: Op) -> list[str]:
    return [name for name in op.weights if not is_vector(name)]


def _read_product(
    checkpoint: Checkpoint, op: Op, lanes: range, order: NDArray[np.intp]
) -> NDArray[np.uint16]:
    """An op's product from its tensors, which are not kept."""
    parts = [
        np.ascontiguousarray(checkpoint.tensor(name, lanes)).view(np.uint16)
        for name in _matrices_of(op)
    ]
    return _product_of(op, parts, order)


def _product_of(op: Op, parts: list[NDArray[Any]], order: NDArray[np.intp]) -> NDArray[Any]:
    """One product's matrix of an op's, [lanes, rows, columns] each, as OpKind.rows says. order: of
    the rows of a head: pair_order().
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
    """Rows of one matrix from queries, keys and values, [lanes, rows, columns] each. Heads of the
    first two have the elements side by side that RoPE turns together.
    """
    lanes, _, columns = parts[0].shape
    heads = [part.reshape(lanes, -1, len(order), columns) for part in parts]
    heads[:2] = [part[:, :, order] for part in heads[:2]]
    return np.concatenate(heads, axis=1).reshape(-1, columns)


def _in_turn(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Two matrices, [lanes, rows, columns] each, as rows of one: _HALF of each in turn."""
    halves = [part.reshape(-1, 1, _HALF, part.shape[2]) for part in parts]
    return np.concatenate(halves, axis=1).reshape(-1, parts[0].shape[2])


def _side_by_side(tensor: NDArray[Any]) -> NDArray[Any]:
    """[lanes, rows, columns] as [rows, lanes * columns]."""
    return np.ascontiguousarray(tensor.swapaxes(0, 1)).reshape(tensor.shape[1], -1)
