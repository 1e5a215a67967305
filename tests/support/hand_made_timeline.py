"""Stamps of a model of one layer, made by hand: what kernels/trace.cuh would leave."""

import numpy as np

from kccl.engine.model.timeline import NUM_STAGE_STAMPS, NUM_STAMPS, Layout, Stamps, TracedOp

OPS = ("qkv", "attend", "out", "gate_up", "down")
TOKEN_STEP_NS, OP_NS = 10_000, 1_000
STAGE_BYTES = 2048
# The stamps of an op, in nanoseconds from its beginning: see KcclDecodeStamp in engine/abi.inc.
STAMPS_NS = (0, 400, 700, 900, 1_000)


def made_stamps(*, rank=0, token_steps=5, ns_per_tick=0.5, origin_ns=10**15, late_ns=0):
    """Stamps of two blocks. An op takes OP_NS, a token step TOKEN_STEP_NS.

    The last 3,000 ns of a token step are in no op.

    Block 1's clock began 12,345 ticks before block 0's. It has no part of attention, and one stage
    less: block 0 has a stage for each product, block 1 none for "down". A stage is asked for 500 ns
    before its op begins, lands 200 ns later, and is let go when the block has its vector.

    Args:
        rank: The rank.
        token_steps: The number of token steps that are traced.
        ns_per_tick: The nanoseconds of a tick of the blocks' clocks.
        origin_ns: When the first token step began.
        late_ns: By how much each stage of block 0 is noticed later.
    """
    names = [*(TracedOp(kind, 0) for kind in OPS), TracedOp("head", -1), TracedOp("end", -1)]
    products = [0, 2, 3, 4, 5]
    stage_ops = np.array([[op, op] for op in products])
    stage_bytes = np.full((5, 2), STAGE_BYTES)
    # Block 1's stages are numbered without a gap.
    stage_ops[3:, 1] = [5, -1]
    stage_bytes[4, 1] = 0
    of_token_step = len(names) * NUM_STAMPS + 5 * NUM_STAGE_STAMPS + 2
    layout = Layout(
        tuple(names), stage_ops, stage_bytes, of_token_step, ring_stages=4, num_lane_groups=2
    )
    values = np.zeros((token_steps, of_token_step, 2), np.uint64)

    def note(index, step, block, ns):
        zero = 1_000_000 + 12_345 * block
        values[step, index, block] = round((ns - origin_ns) / ns_per_tick) + zero

    for index in range(token_steps):
        begin = origin_ns + index * TOKEN_STEP_NS
        for block in range(2):
            for op, traced in enumerate(names):
                for stamp, ns in enumerate(STAMPS_NS):
                    is_absent = traced.kind == "attend" and block == 1 and stamp < NUM_STAMPS - 1
                    if not is_absent and (traced.kind, stamp) != ("end", 3):
                        at = begin + op * OP_NS + ns
                        note(op * NUM_STAMPS + stamp, index, block, at)
            for stage, op in enumerate(stage_ops[:, block]):
                if op < 0:
                    continue
                first = len(names) * NUM_STAMPS + stage * NUM_STAGE_STAMPS
                asked = begin + op * OP_NS - 500
                late = late_ns if block == 0 else 0
                for stamp, ns in enumerate((asked, asked + 200 + late, asked + 900)):
                    note(first + stamp, index, block, ns)
            note(of_token_step - 2, index, block, begin)
            values[index, of_token_step - 1, block] = begin
    return Stamps(rank, layout, values)
