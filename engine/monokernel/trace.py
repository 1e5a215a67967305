"""Reads what describe_trace() (kernels/trace_layout.cuh) writes: the meaning of stamps."""

import numpy as np

from ..base.core import ffi
from ..model.ops import KINDS, Place, products_in
from ..model.program import Program
from ..model.timeline import NUM_STAGE_STAMPS, Layout, TracedOp

_SIZES_BYTES: int = ffi.sizeof("KcclDecodeTraceSizes")
_STAGE_BYTES: int = ffi.sizeof("KcclDecodeStage")
# The struct KcclDecodeStage as a NumPy dtype.
_STAGE = np.dtype([(name, np.uint32) for name, _ in ffi.typeof("KcclDecodeStage").fields])
assert _STAGE.itemsize == _STAGE_BYTES


def numbers_bytes(of_token_step: int, blocks: int) -> int:
    """Returns the most bytes that describe_trace() writes.

    Args:
        of_token_step: The number of stamps of a block in a token step.
        blocks: The number of the rank's blocks.
    """
    return _SIZES_BYTES + _STAGE_BYTES * (of_token_step // NUM_STAGE_STAMPS * blocks)


def layout_of(program: Program, blocks: int, data: bytes) -> Layout:
    """Reads what describe_trace() has written for a model. Returns what its stamps mean."""
    sizes = ffi.from_buffer("KcclDecodeTraceSizes *", data)
    # The kernel counts the last norm and the head as one op, and the end of the token step as
    # another.
    kinds = [(op, KINDS[op.kind]) for op in program.ops]
    ops = [
        TracedOp(op.kind, op.layer if kind.place is Place.LAYER else -1)
        for op, kind in kinds
        if kind.place is Place.LAYER or kind.is_product
    ]
    ops.append(TracedOp("end", -1))
    assert sizes.num_ops == len(ops)
    num = blocks * sizes.num_stages
    stages = np.frombuffer(data, _STAGE, num, _SIZES_BYTES).reshape(blocks, sizes.num_stages).T
    products, stage_bytes = stages["product"], stages["num_bytes"].astype(np.int64)
    stage_ops = np.full(stages.shape, -1)
    for number, product in enumerate(products_in(program.config), start=1):
        at = np.array([index for index, op in enumerate(ops) if op.kind == product])
        for block in range(blocks):
            # A block has equally many stages of a product in each layer, so they are divided evenly
            # among the layers' ops.
            mine = np.flatnonzero(products[:, block] == number)
            stage_ops[mine, block] = np.repeat(at, len(mine) // len(at))
    return Layout(
        tuple(ops),
        stage_ops,
        stage_bytes,
        of_token_step=sizes.of_token_step,
        ring_stages=sizes.ring_stages,
        num_lane_groups=sizes.num_lane_groups,
    )
