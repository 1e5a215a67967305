"""Tuning: the numbers that say how the monokernel uses a machine. The kernel is compiled with them
(S in kernels/shape.cuh).
"""

from dataclasses import dataclass

# The shared memory that a block may have on sm_90a.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the monokernel uses a GPU. Only `warps`, `strip_tiles` and `kv_strands` change bits of
    results.

    Attributes:
        blocks: The blocks of a rank, a multiple of its residuals.
        warps: The consumer warps of a block. Each has an equal share of the columns of a product.
        stages: The most stages of a block's ring of weights.
        stage_steps: The tiles that a stage has for each warp, in the format with the smallest
            tiles.
        strip_tiles: For formats with scales: the most tiles of a warp that share the scales of
            their rows. A power of two.
        in_flight: The most stages of a product that are copied at the same time before the block's
            warps have freed two of that product's stages.
        urgent_in_flight: The most stages of a product that are copied at the same time once two of
            them have been freed; with experts, also for all stages of experts. 0 stands for
            in_flight.
        parked: With experts: the most stages of the next layer that are copied before those of the
            experts, whose copies wait for the router.
        kv_strands: The KV strands of a KV head, a power of two. A strand is every kv_strands-th
            tile of 16 positions, and one warp goes over it.
        kv_splits: The KV splits of a KV head, a power of two. Each has equally many KV strands, and
            one block goes over it.
        merges_first: Whether the blocks of a KV head merge the partial results of its KV splits. If
            not, each block of the output projection does.
        others: The warps of a block that do not multiply. One copies weights; without a ring it
            only watches over waits. Another collects messages.
        shared_bytes: The bytes of a block's shared memory. The ring has as many stages as fit.
        stagger_ns: Delays the beginning of token steps: the blocks of residual i begin
            (i % staggers) * stagger_ns nanoseconds later than those of residual 0.
        staggers: See stagger_ns.
        delay_ns: For tests: at each op, warps wait for a random time of at most this many
            nanoseconds.
        slow_rank: For tests: the rank whose warps always wait delay_ns. -1 means none.
        ablated: Which work the kernel leaves out, to measure what it costs: bits of
            KcclDecodeAblation.
        weights_in_registers: Whether each consumer warp loads a stage of its weights ahead into
            registers. If not, a ring of stages is in block-shared memory. Only the ring uses
            `stages`, `in_flight` and `urgent_in_flight`.
        columns: The most positions of a request that a token step runs, 1 to 8
            (kernels/columns.cuh). Requests for logits run so many at a time, those with drafts one
            more than they have drafts, others one.
        seats: The most requests that run at the same time, 1 to 8 (kernels/seats.cuh).
        chunk: The positions of a prompt that run at the same time: a multiple of 4, on AMD of 8. 1:
            the decode kernel runs prompts, and the fields chunk_* are not used.
        chunk_least: The fewest positions that run in a chunk. The decode kernel runs fewer ones.
        chunk_warps: The consumer warps of a block in prefill.
        chunk_others: The other warps of a block in prefill. One of them copies vectors.
        chunk_stages: The stages of a block's ring of vectors.
        chunk_steps: The most steps of a stage of that ring. A step is 16 elements of all positions.
        chunk_shares: In a mixture of experts, the shares into which the positions of a chunk are
            cut for the experts' last product. A warp keeps the sums of one share.
        squads: The most chunks that the blocks of a residual run beside each other, each by a squad
            (kernels/prefill_shape.cuh). Prompts of more positions than a chunk have a kernel with
            squads. 1: no prompt has, and the fields squad_* are not used.
        squad_warps, squad_others, squad_stages, squad_steps: With squads, in place of chunk_*.
        squad_rows: The row tiles that a warp of a squad multiplies at a time.
        squad_each: The most multiplications that a warp of a squad makes with a tile of weights.
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
    parked: int = 0
    others: int = 2
    shared_bytes: int = SHARED_BYTES
    stagger_ns: int = 0
    staggers: int = 1
    delay_ns: int = 0
    slow_rank: int = -1
    ablated: int = 0
    weights_in_registers: bool = False
    columns: int = 1
    seats: int = 1
    chunk: int = 1
    chunk_least: int = 1
    chunk_warps: int = 12
    chunk_others: int = 1
    chunk_stages: int = 5
    chunk_steps: int = 6
    chunk_shares: int = 1
    squads: int = 1
    squad_warps: int = 8
    squad_others: int = 1
    squad_stages: int = 5
    squad_steps: int = 4
    squad_rows: int = 2
    squad_each: int = 8
