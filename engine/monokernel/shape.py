"""Tuning: the numbers of how the monokernel uses a machine. They are compiled into it (S in
kernels/shape.cuh).
"""

from dataclasses import dataclass

# The shared memory that a block may have on sm_90a.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the monokernel uses a GPU; only `warps`, `strip_tiles` and `kv_strands` change bits of
    results.

    Attributes:
        blocks: Blocks that work on one rank, a multiple of its residuals.
        warps: Warps of a block that multiply; the columns of each product are cut into as many
            parts.
        stages: The most stages of a block's ring of weights.
        stage_steps: Tiles of each warp in a stage, of the format with the smallest tiles.
        strip_tiles: A power of two: the most tiles of a warp that share the scales of their rows,
            where a format has scales.
        in_flight: The most stages that are copied at the same time, until a block's warps have
            freed two stages of the product that is copied.
        urgent_in_flight: The most stages that are copied at the same time from then on; 0:
            in_flight.
        kv_strands: KV strands of a KV head, a power of two: each has every so many-th tile of 16
            positions, and one warp goes over it.
        kv_splits: KV splits of a KV head, a power of two: each is an equal number of KV strands,
            and one block goes over it.
        merges_first: Whether the blocks of a KV head merge the partial results of its KV splits. If
            not, each block of the output projection does.
        others: Warps of a block that do not multiply: one copies weights, or only watches over
            waits; one collects messages.
        shared_bytes: The bytes of a block's shared memory. The ring has as many stages as fit.
        stagger_ns: The blocks of residual i begin a token step later than those of residual 0, by
            i % staggers times so many nanoseconds.
        staggers: See stagger_ns.
        delay_ns: For tests: warps wait at each op, a random time of at most so many nanoseconds.
        slow_rank: For tests: the rank whose warps always wait that long; -1: none.
        ablated: What the kernel leaves out to show what that costs, as bits of KcclDecodeAblation.
        weights_in_registers: Whether each warp that multiplies loads a stage of its weights ahead,
            into registers. If not, a ring of stages is in block-shared memory: stages, in_flight
            and urgent_in_flight are the ring's alone.
        chunk: Positions of a prompt that run at the same time, a multiple of 4, on AMD of 8; 1: a
            prompt runs as decoding does, and the other numbers of chunks have no meaning.
        chunk_warps: The consumer warps of a block in prefill.
        chunk_others: The other warps of a block in prefill; one of them copies.
        chunk_stages: The stages of a block's ring of vectors.
        chunk_steps: The most stretches of 16 elements of all positions in a stage of that ring.
    """

    blocks: int
    warps: int
    stages: int
    stage_steps: int
    in_flight: int
    kv_strands: int
    kv_splits: int
    strip_tiles: int = 1
    merges_first: bool = False
    urgent_in_flight: int = 0
    others: int = 2
    shared_bytes: int = SHARED_BYTES
    stagger_ns: int = 0
    staggers: int = 1
    delay_ns: int = 0
    slow_rank: int = -1
    ablated: int = 0
    weights_in_registers: bool = False
    chunk: int = 1
    chunk_warps: int = 12
    chunk_others: int = 1
    chunk_stages: int = 5
    chunk_steps: int = 6
