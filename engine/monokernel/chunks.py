"""Chooses how prefill runs a prompt in chunks, and the KV strands: fields of shape.Tuning."""

from collections.abc import Iterator
from dataclasses import replace

from ..base.core import lib
from ..model.config import ModelConfig
from ..model.ops import KINDS
from ..model.program import Program
from .layout import TILE, Product, has_scales, products_of
from .machine import Kind

# A partial result of attention has so many numbers behind those of a head. Prefill merges so many
# partial results at a time.
_PART_EXTRA: int = 4 * lib.kKcclDecodePartialFloat4s
_FOLD: int = lib.kKcclDecodeFold
# The share of a block's shared memory that prefill's partial results may take. They lie in the ring
# of vectors, and the rest of the kernel needs shared memory, too.
_LEAST_STAGES, _MOST_OF_SHARED = 5, 2 / 3
# That share in a mixture of experts. A block holds the sums of few rows there, so more is left. And
# with fewer KV strands decode would have fewer warps for attention.
_MOST_OF_SHARED_IN_MIXTURE = 0.7
# The bytes of a tile's sums for one vector, of a barrier, of a line, and of prefill's shared memory
# that the sizes below leave out, with some to spare (kernels/mma.cuh, kernels/prefill_shape.cuh).
_SUMS_BYTES, _BARRIER_BYTES, _LINE_BYTES, _OTHER_BYTES = 128, 8, 16, 2048

# A warp has registers for the sums of at most so many multiplications by a tile of weights.
_MOST_EACH = 16


def kv_strands_for(c: ModelConfig, kind: Kind, shared_bytes: int) -> int:
    """Returns the KV strands of a KV head: as many as prefill has room for. They change bits, so
    they depend only on the model and the kind of device.
    """
    kv_strands = kind.most_kv_strands
    share = _MOST_OF_SHARED if c.experts is None else _MOST_OF_SHARED_IN_MIXTURE
    while kv_strands > 1 and (_partial_bytes(c, kind, kv_strands) > share * shared_bytes):
        kv_strands //= 2
    return kv_strands


def chunk_stages(c: ModelConfig, kind: Kind, kv_strands: int) -> int:
    """Returns the stages of a ring of vectors: enough for the partial results of attention."""
    stage = kind.chunk_steps * kind.chunk * TILE * 4
    return max(_LEAST_STAGES, -(-_partial_bytes(c, kind, kv_strands) // stage))


def chunk_shares(kind: Kind) -> int:
    """Returns Tuning.chunk_shares for a mixture of experts."""
    return max(1, kind.chunk // kind.chunk_share)


def chunk_warps(program: Program, lanes: int, blocks: int, kind: Kind) -> int:
    """Returns the number of warps that copies the fewest vectors. A product copies its vectors anew
    for each row tile, and for each part of the positions that a warp multiplies. A residual has
    `blocks` blocks.
    """
    positions = kind.chunk // kind.vectors

    def copied(warps: int) -> int:
        columns = 0
        for each in products_of(program, lanes):
            tiles = -(-each.rows // TILE // blocks)
            parts = chunk_parts(tiles, positions, warps)
            columns += each.columns * each.lanes * -(-tiles * parts // warps)
        return columns

    return min(kind.chunk_warps, key=copied)


def squads_for(program: Program, lanes: tuple[int, int], blocks: int, kind: Kind) -> int:
    """Returns Tuning.squads: 1 for experts' products, and for formats with scales, whose sums take
    more registers. Also 1 where a module's outputs need the lanes of other blocks at once, because
    one round's sums would have to be kept until these are there.

    Args:
        program: The model's program.
        lanes: Those of the model, and those of a residual on this rank.
        blocks: Those of a residual.
        kind: The kind of device.
    """
    of_model, of_residual = lanes
    waits = of_model > of_residual and any(op.is_blocking for op in program.ops)
    if program.config.experts is not None or has_scales(program) or waits:
        return 1
    return min(kind.squads if of_residual > 1 else kind.squads_of_lane, blocks)


def message_modules(program: Program, squads: int) -> int:
    """Returns for how many neighbouring modules prefill keeps messages: for all with one squad.
    A module's messages take the place of those of the module so many before it. A block that adds
    up the messages of a module knows that the blocks with its rows have finished that module. So
    when it sends, they must have added up by then what it overwrites.
    """
    ends = [op for op in program.ops if KINDS[op.kind].ends_module]
    if squads == 1:
        return len(ends)
    sources = [-1 if op.receives is None else op.receives for op in ends]
    readers = {source: module for module, source in enumerate(sources)}

    def is_enough(num: int) -> bool:
        return all(
            readers.get(module - num, -1) <= max(sources[: module + 1])
            for module in range(num, len(ends))
            if ends[module].sends
        )

    return next(num for num in range(1, len(ends) + 1) if is_enough(num))


def chunk_parts(tiles: int, vectors: int, warps: int) -> int:
    """Returns the number of parts into which prefill cuts the positions of a chunk, so that each of
    a block's warps has work and enough registers for its sums: ChunkPlan::parts in
    kernels/prefill_shape.cuh.

    Args:
        tiles: Row tiles of the block.
        vectors: The positions in units of the vectors that a multiplication takes.
        warps: The warps that compute.
    """
    least = max(-(-warps // tiles), -(-vectors // _MOST_EACH))
    return next((n for n in range(least, vectors) if vectors % n == 0), vectors)


def fitted_to_memory(
    program: Program,
    of_residual: tuple[int, int],
    kind: Kind,
    warps: int,
    kv_strands: int,
    shared_bytes: int,
) -> Kind:
    """Returns `kind` with the longest chunk of a mixture of experts for which a block has memory,
    and those numbers of warps with which it has. Neither changes bits.

    Args:
        program: The model.
        of_residual: The lanes and the blocks of a residual. With fewer blocks each holds more sums.
        kind: The kind of device, with the chunk of a mixture.
        warps: Decode's warps.
        kv_strands: The KV strands of a KV head.
        shared_bytes: The bytes of a block's shared memory.
    """
    for each in _shorter(kind):
        fitting = tuple(
            number
            for number in each.chunk_warps
            if _fits(program, of_residual, each, (warps, number), kv_strands, shared_bytes)
        )
        if fitting:
            return replace(each, chunk_warps=fitting)
    return kind


def _shorter(kind: Kind) -> Iterator[Kind]:
    """Yields the kind with chunks of half the length each time, down to one multiplication's."""
    while kind.chunk >= kind.vectors:
        yield kind
        chunk = kind.chunk // 2
        kind = replace(kind, chunk=chunk, chunk_share=min(kind.chunk_share, chunk))


def _fits(
    program: Program,
    of_residual: tuple[int, int],
    kind: Kind,
    warps: tuple[int, int],
    kv_strands: int,
    shared_bytes: int,
) -> bool:
    """Tells whether a block has memory for PrefillShared (kernels/prefill_shape.cuh), in which the
    experts and the partial results take the place of the totals and the ring. warps: of decode, and
    of prefill.
    """
    c, (of_decode, number), (lanes, blocks) = program.config, warps, of_residual
    queries = max(kind.vectors, c.num_heads // c.num_kv_heads)
    strand = 2 * queries * TILE * 4 + -(-queries // 4) * _LINE_BYTES
    most = max(_totals(each, blocks) for each in products_of(program, lanes))
    totals = most * kind.chunk * TILE * 4
    stage = kind.chunk_steps * kind.chunk * TILE * 4
    rest = number * strand + kind.chunk * of_decode * 4 + totals + _OTHER_BYTES
    stages = (shared_bytes - rest) // (stage + 2 * _BARRIER_BYTES)
    stages = min(stages, chunk_stages(c, kind, kv_strands))
    needed = max(_experts_bytes(c, kind, number), _partial_bytes(c, kind, kv_strands))
    return stages >= 2 and needed <= totals + stages * stage


def _totals(product: Product, blocks: int) -> int:
    """Returns how many row tiles, one for each lane, a block has sums of. Experts have none."""
    if KINDS[product.kind].has_experts:
        return 0
    tiles = -(-product.rows // TILE // blocks)
    return tiles * product.lanes


def _experts_bytes(c: ModelConfig, kind: Kind, warps: int) -> int:
    """Returns the bytes of ExpertsArea (kernels/prefill_choice.cuh)."""
    assert c.experts is not None
    places, lists = c.experts.chosen, c.experts.num * chunk_shares(kind)
    choice = kind.chunk * places * (8 + 2) + 4 * lists + 4 * c.experts.num + _OTHER_BYTES
    share = min(kind.chunk, kind.chunk_share)
    return choice + warps * (share * _SUMS_BYTES + kind.vectors * TILE * 4)


def _partial_bytes(c: ModelConfig, kind: Kind, kv_strands: int) -> int:
    """Returns the bytes of the partial results of all KV strands, for queries that share a
    multiplication, and of the nodes above them: ChunkLayout::Partials in kernels/prefill_shape.cuh.
    """
    nodes = -(-kv_strands // _FOLD)
    queries = max(kind.vectors, c.num_heads // c.num_kv_heads)
    return (kv_strands + nodes) * queries * (c.head_dim + _PART_EXTRA) * 4
