"""Reads each op's output, at the position that ran last, from a rank's exchange buffer.

kernels/exchange_buffer.cuh says what the buffer holds. For four ops it is not yet the reference's
output: the embedding's rows in their format, queries and keys before norm and RoPE, partial results
of attention, and the last residual before its norm. This file computes the missing step from them.
If the kernel computes that step wrong, the next op's output shows the error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from ..formats.base import Format
from ..model.ops import KINDS, MODULES, Vector
from ..model.program import Op, Program
from ..model.rotations import Rotations, pair_order
from .layout import TILE

Array = NDArray[Any]
_FLOAT4_BYTES: int = lib.kKcclDecodeFloat4Bytes
# How many numbers a partial result has after the head_dim numbers of its weighted sum.
_PARTIAL_EXTRA: int = 4 * lib.kKcclDecodePartialFloat4s


class Slots(NamedTuple):
    """Where each kind of vectors begins in an exchange buffer, in float4s: see KcclDecodeSizes."""

    residuals: int
    qkv: int
    attended: int
    acts: int
    routed: int


class Outputs:
    """Reads a rank's exchange buffer.

    Args:
        program: The model's program.
        norms: The norms, as norms_of() returns them, and the rank's attention sinks.
        lanes: The lanes of the rank.
        rotations: The rank's tables of cosines and sines.
        slots: Where each kind of vectors begins in the exchange buffer.
        kv_splits: See Tuning.
        read: Reads the exchange buffer: (offset, number of bytes) -> bytes.
    """

    def __init__(
        self,
        program: Program,
        norms: Mapping[str, Array],
        lanes: range,
        rotations: Rotations,
        slots: Slots,
        kv_splits: int,
        read: Callable[[int, int], bytes],
    ) -> None:
        self._program, self._lanes, self._slots = program, lanes, slots
        self._rotations = rotations
        self._kv_splits, self._read = kv_splits, read
        c = program.config
        self._norms = norms
        self._order = pair_order(c.head_dim, is_interleaved=c.rope.is_interleaved)

    def residuals(self) -> Sequence[int]:
        """Returns the numbers of the residuals that are whole in the rank's exchange buffer."""
        return [0] if self._program.num_residuals == 1 else self._lanes

    def of(self, op: Op, position: int) -> dict[int, Array]:
        """Returns an op's output by lane or residual: float32 [values]. The op must not be "embed"
        or "head", whose outputs are not in the exchange buffer.
        """
        match KINDS[op.kind].gives:
            case Vector.HEADS:
                return {lane: self._qkv(op, lane, position) for lane in self._lanes}
            case Vector.ATTENDED:
                return {lane: self._attended(op, lane) for lane in self._lanes}
            case Vector.ACTS:
                begin = self._slots.acts
                return {lane: self._of_lane(op, lane, begin, op.shape[1]) for lane in self._lanes}
            case Vector.ROUTED:
                # The logits of whole tiles of rows, of which only the first ones are experts'.
                num = -(-op.shape[1] // TILE) * TILE
                logits = self._floats(self._slots.routed + op.layer * (num // 4), num)
                return {0: logits[: op.shape[1]]}
            case Vector.RESIDUAL:
                return {each: self._residual(op.module, each) for each in self.residuals()}
            case Vector.NORMED:
                return self._final()
            case _:
                raise ValueError(op.kind)

    def _floats(self, index4: int, num: int) -> Array:
        return np.frombuffer(self._read(index4 * _FLOAT4_BYTES, 4 * num), np.float32)

    def _of_lane(self, op: Op, lane: int, begin: int, num: int) -> Array:
        lanes = self._program.config.num_lanes
        return self._floats(begin + (op.layer * lanes + lane) * (num // 4), num)

    def _residual(self, module: int, residual: int) -> Array:
        hidden = self._program.config.hidden
        at = module * self._program.num_residuals + residual
        return self._floats(self._slots.residuals + at * (hidden // 4), hidden)

    def _qkv(self, op: Op, lane: int, position: int) -> Array:
        c = self._program.config
        heads = self._of_lane(op, lane, self._slots.qkv, op.shape[1]).reshape(-1, c.head_dim)
        num_queries = c.num_heads // c.num_lanes
        num_turned = num_queries + c.num_kv_heads // c.num_lanes
        turned = heads[:num_turned]
        if op.head_norms():
            squares = (turned * turned).mean(axis=-1, keepdims=True)
            both = np.stack([self._norms[name] for name in op.head_norms()])
            norms = both[(np.arange(num_turned) >= num_queries).astype(int)]
            turned = turned / np.sqrt(squares + np.float32(c.norm_eps)) * norms
        cosine, sine = self._rotations.cosines[position], self._rotations.sines[position]
        a, b = turned[:, ::2], turned[:, 1::2]
        pairs = np.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
        in_order = np.empty_like(turned)
        in_order[:, self._order] = pairs.reshape(turned.shape)
        return np.concatenate([in_order, heads[num_turned:]]).ravel()

    def _attended(self, op: Op, lane: int) -> Array:
        c = self._program.config
        heads, each = c.num_heads // c.num_lanes, c.head_dim + _PARTIAL_EXTRA
        found = self._of_lane(op, lane, self._slots.attended, heads * self._kv_splits * each)
        partials = found.reshape(heads, self._kv_splits, each)
        maxima, weights = partials[..., c.head_dim, None], partials[..., c.head_dim + 1, None]
        scales = np.exp2(maxima - maxima.max(axis=1, keepdims=True))
        sums: Array = (partials[..., : c.head_dim] * scales).sum(axis=1)
        total = (weights * scales).sum(axis=1)
        for name in op.sinks():
            sinks = self._norms[name][self._lanes.index(lane)][:, None]
            total += np.exp2(sinks * np.float32(np.log2(np.e)) - maxima.max(axis=1))
        sums /= total
        return sums.ravel()

    def _final(self) -> dict[int, Array]:
        c, program = self._program.config, self._program
        (norm,) = program.by_name["final"].norms()
        has_parts = program.num_head_parts > 1
        last = len(MODULES) * c.num_layers - 1
        which = self.residuals() if has_parts else range(program.num_residuals)
        x = np.stack([self._residual(last, each) for each in which])
        squares = (x * x).mean(axis=-1, keepdims=True)
        n = x / np.sqrt(squares + np.float32(c.norm_eps)) * self._norms[norm]
        if has_parts:
            return dict(zip(which, n, strict=True))
        return {0: n.mean(axis=0, dtype=np.float32)}


def embedded(row: bytes, stored_in: Format) -> Array:
    """Returns a row of the embedding in FP32."""
    return stored_in.to_float32(np.frombuffer(row, stored_in.word))
