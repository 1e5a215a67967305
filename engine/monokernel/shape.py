"""What of a model and a machine is compiled into the monokernel: kernels/shape.cuh calls it S."""

from dataclasses import dataclass

from ..base.core import lib

TILE: int = lib.kKcclDecodeTileRows
# What a block may have on sm_90.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the monokernel uses a GPU; only `warps` and `strands` change bits of the results.

    Attributes:
        blocks: Blocks that work on one rank, a multiple of its residuals.
        warps: Warps of a block that multiply; the columns of each product are cut into as many
            parts.
        stages: Most stages of a block's ring of weights.
        stage_steps: Tiles of each warp in a stage, of 512 bytes each.
        in_flight: Most stages that are copied at the same time, until a block's warps have let go
            of two stages of the product that is copied.
        urgent_in_flight: The same from then on; 0: as in_flight.
        strands: Into how many parts the positions of a KV head are cut, a power of two.
        splits: Into how many parts the strands are cut, one for each block; a power of two.
        merges_first: Whether the blocks of a KV head merge what attention gives for its splits. If
            not, each block of the output projection does.
        others: Warps of a block that do not multiply: one copies weights, or only watches over
            waits; one collects messages.
        shared_bytes: Of a block's shared memory. The ring has as many stages as fit.
        stagger_ns: The blocks of residual i begin i % staggers times so much later than the first.
        staggers: See stagger_ns.
        delay_ns: For tests: warps wait at each op, a random time of at most so many nanoseconds.
        slow_rank: For tests: the rank whose warps always wait that long; -1: none.
        ablated: What is left out to learn what it costs, as bits of KcclDecodeAblation.
        weights_in_registers: Whether each warp that multiplies loads a stage of its weights ahead,
            into registers. If not, a ring of stages is in block-shared memory: stages, in_flight
            and urgent_in_flight are the ring's alone.
        chunk: Positions of a prompt that run at the same time, a multiple of 4, on AMD of 8; 1: a
            prompt runs as decoding does, and the other numbers of chunks have no meaning.
        chunk_warps: Warps of a block that compute then.
        chunk_others: The other warps; one of them copies.
        chunk_stages: Of a block's ring of vectors.
        chunk_steps: At most so many stretches of 16 elements of all positions are in a stage.
    """

    blocks: int
    warps: int
    stages: int
    stage_steps: int
    in_flight: int
    strands: int
    splits: int
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
