"""Chooses how the monokernel uses a machine: shape.Tuning."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import kccl

from ..base.core import lib
from ..model.config import ModelConfig
from ..model.program import Program
from ..model.variant import USUAL, Variant
from .machine import Kind, Machine, num_groups
from .shape import TILE, Tuning

_TILE_BYTES: int = lib.kKcclDecodeTileBytes
_MOST_STEPS = 8
_MOST_STAGES = 16
# Residuals begin a round at so many moments. They are a sixth of a layer apart, and at most as long
# as the weights that are loaded ahead feed a block.
_STAGGERS, _STAGGERS_OF_LAYER = 4, 6
# The strands of an ordinary model are split until a split has so many.
_LEAST_STRANDS = 4
# Blocks of all ranks. At a round's end a thread of 32 waits for each 32nd block, and has 32 bits
# to tell them apart (Waiter::await in kernels/watch.cuh).
_MOST_BLOCKS = 32 * 32
# In prefill, attention has its parts where the vectors' ring is: that is at most so much of a
# block's shared memory, because the rest needs some, too.
_LEAST_CHUNK_STAGES, _MOST_OF_SHARED = 5, 2 / 3


def tuning_for(
    program: Program, world_size: int, machine: Machine, blocks: int | None = None
) -> Tuning:
    """How a machine runs a model.

    Args:
        program: The model's.
        world_size: Number of ranks.
        machine: What each of them has.
        blocks: Blocks of each rank; None: as many as have work.

    Raises:
        InvalidArgument: The machine has too few multiprocessors, or cannot run so many blocks; a
            block would have no row; or all ranks together would have too many blocks.
    """
    c = program.config
    lanes = program.most_lanes(world_size)
    groups = num_groups(program, world_size)
    most = min(machine.multiprocessors, _MOST_BLOCKS // world_size)
    # A block without a row of a layer's longest product would only wait.
    longest = max(rows for rows, _, _ in _products(c, lanes // groups)) // TILE
    useful = min(most // groups, longest) * groups
    if blocks is None:
        blocks = useful
    if not 0 < blocks <= useful or blocks % groups:
        raise kccl.InvalidArgument(
            f"blocks is {blocks}, must be a multiple of the rank's {groups} residuals, and at most "
            f"{useful}: the rank has {machine.multiprocessors} multiprocessors, all ranks together "
            f"have at most {_MOST_BLOCKS} blocks, and a residual's longest product has {longest} "
            f"tiles of {TILE} rows"
        )
    kind = machine.kind
    warps, steps = _warps_and_steps(program, world_size, kind)
    stage = steps * warps * _TILE_BYTES
    ahead = stage if kind.weights_in_registers else machine.shared_bytes
    has_chunks = kind.chunk > 1
    strands = _strands(c, machine) if has_chunks else kind.most_strands
    kv_heads = lanes // groups * c.num_kv_heads // c.num_lanes
    block_bytes = _layer_bytes(c, lanes) // blocks
    # Other lanes' work hides a Laneformer's attention, and more splits are more to poll for.
    splits = _splits(kv_heads, blocks // groups, strands, warps if groups > 1 else _LEAST_STRANDS)
    chunk_warps = _chunk_warps(c, lanes // groups, blocks // groups, kind)
    return Tuning(
        blocks=blocks,
        warps=warps,
        stages=_MOST_STAGES,
        stage_steps=steps,
        in_flight=max(1, round(_quiet_bytes(program, block_bytes, kind) / stage)),
        urgent_in_flight=max(1, kind.bytes_in_flight // stage),
        strands=strands,
        splits=splits,
        # A block that has no unit of attention would poll for all parts meanwhile.
        merges_first=kv_heads * splits < blocks // groups,
        shared_bytes=machine.shared_bytes,
        stagger_ns=_stagger_ns(block_bytes, kind, ahead) if groups > 1 and has_chunks else 0,
        staggers=_STAGGERS,
        weights_in_registers=kind.weights_in_registers,
        others=-(warps + 2) % kind.warps_together + 2,
        chunk=kind.chunk,
        chunk_others=-(chunk_warps + 1) % kind.warps_together + 1,
        chunk_warps=chunk_warps,
        chunk_stages=_chunk_stages(c, kind, strands),
        chunk_steps=kind.chunk_steps,
    )


def _products(c: ModelConfig, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Rows, columns of a lane and lanes of the layers' products, for a group of lanes."""
    heads, kv_heads = c.num_heads // c.num_lanes, c.num_kv_heads // c.num_lanes
    ffn = c.ffn // c.num_lanes
    yield lanes * (heads + 2 * kv_heads) * c.head_dim, c.hidden, 1
    yield c.hidden, heads * c.head_dim, lanes
    yield 2 * lanes * ffn, c.hidden, 1
    yield c.hidden, ffn, lanes


def _warps_and_steps(program: Program, world_size: int, kind: Kind) -> tuple[int, int]:
    """The warps that pad the model least, and the steps of a stage. The warps change bits, so they
    depend on the model and the kind of device alone.
    """
    c = program.config

    def padded(warps: int) -> int:
        """Bytes of a layer, with the zeros that fill up the warps' parts."""
        return sum(
            rows * lanes * -(-columns // (TILE * warps)) * warps
            for rows, columns, lanes in _products(c, c.num_lanes)
        )

    def steps(warps: int, numbers: Collection[int]) -> int:
        """The most that are a whole part, or a multiple, of each product's."""
        all_steps = [
            of_group * -(-columns // (TILE * warps))
            for lanes in numbers
            for _, columns, of_group in _products(c, lanes)
        ]
        return max(
            num
            for num in range(
                1, min(_MOST_STEPS, kind.most_stage_bytes // (warps * _TILE_BYTES)) + 1
            )
            if all(each % num == 0 or num % each == 0 for each in all_steps)
        )

    def key(warps: int) -> tuple[bool, int]:
        is_small = steps(warps, [most_lanes]) * warps * _TILE_BYTES < kind.least_stage_bytes
        return is_small, padded(warps)

    is_ordinary = program.num_residuals == 1
    numbers = {len(program.lanes_of(rank, world_size)) for rank in range(world_size)}
    most_lanes = c.num_lanes if is_ordinary else 1
    warps = min(kind.warps, key=key)
    return warps, steps(warps, numbers if is_ordinary else [1])


def _splits(kv_heads: int, blocks: int, strands: int, least: int) -> int:
    """Splits of each KV head's strands: as many as there are blocks, but splits of `least` strands
    or fewer are not halved.
    """
    splits = 1
    while splits * least < strands and 2 * splits * kv_heads <= blocks:
        splits *= 2
    return splits


def _layer_bytes(c: ModelConfig, lanes: int) -> int:
    """Bytes of a rank's weights of a layer, of so many lanes."""
    return 2 * sum(rows * columns * of_group for rows, columns, of_group in _products(c, lanes))


def _quiet_bytes(program: Program, block_bytes: int, kind: Kind) -> int:
    """Bytes in flight before a block multiplies. `block_bytes`: its weights of a layer."""
    is_short = program.num_residuals == 1 and block_bytes <= kind.short_layer_bytes
    return kind.quietest_bytes if is_short else kind.quiet_bytes


def _stagger_ns(block_bytes: int, kind: Kind, ahead: int) -> int:
    """A block has `block_bytes` of a layer's weights, and has loaded `ahead` bytes ahead."""
    return min(block_bytes // _STAGGERS_OF_LAYER, ahead) // kind.bytes_per_ns


def _strands(c: ModelConfig, machine: Machine) -> int:
    """As many as prefill has room for. They change bits, so they depend on the model and the kind
    of device alone.
    """
    strands = machine.kind.most_strands
    while strands > 1 and _part_bytes(c, machine.kind, strands) > (
        _MOST_OF_SHARED * machine.shared_bytes
    ):
        strands //= 2
    return strands


def _part_bytes(c: ModelConfig, kind: Kind, strands: int) -> int:
    """Bytes of all strands' parts of queries that share a multiplication, and of the nodes above
    them: Chunk::Parts in kernels/prefill_shape.cuh.
    """
    nodes = -(-strands // 8)
    queries = max(kind.vectors, c.num_heads // c.num_kv_heads)
    return (strands + nodes) * queries * (c.head_dim + 4) * 4


def _chunk_warps(c: ModelConfig, lanes: int, blocks: int, kind: Kind) -> int:
    """Those that copy the fewest vectors: a product copies its vectors anew for each row tile and
    part of the positions that a warp multiplies. A residual has `blocks` blocks.
    """
    positions = kind.chunk // kind.vectors

    def copied(warps: int) -> int:
        columns = 0
        for rows, each, of_group in _products(c, lanes):
            tiles = -(-rows // TILE // blocks)
            # As ChunkPlan::parts in kernels/prefill_shape.cuh.
            parts = next(
                (n for n in range(1, positions) if positions % n == 0 and tiles * n >= warps),
                positions,
            )
            columns += each * of_group * -(-tiles * parts // warps)
        return columns

    return min(kind.chunk_warps, key=copied)


def _chunk_stages(c: ModelConfig, kind: Kind, strands: int) -> int:
    """Enough for attention's parts."""
    stage = kind.chunk_steps * kind.chunk * TILE * 4
    return max(_LEAST_CHUNK_STAGES, -(-_part_bytes(c, kind, strands) // stage))


def with_variant(usual: Tuning, variant: Variant) -> Tuning:
    """The tuning of a variant of the decode kernel. It fills no cache in chunks: the usual kernel
    does.

    Raises:
        InvalidArgument: The variant is of a ring of weights, and the tuning has none.
    """
    if variant == USUAL:
        return usual
    if usual.weights_in_registers:
        _check_without_ring(variant)
    return replace(
        usual,
        chunk=1,
        ablated=variant.ablated,
        stage_steps=variant.stage_steps or usual.stage_steps,
        in_flight=variant.in_flight or usual.in_flight,
        urgent_in_flight=variant.in_flight or usual.urgent_in_flight,
    )


def _check_without_ring(variant: Variant) -> None:
    for is_asked, what in (
        (variant.traces, "a timeline"),
        (variant.in_flight, "in-flight=N"),
        (variant.pins, "pin:P"),
    ):
        if is_asked:
            raise kccl.InvalidArgument(
                f"{what} is of stages in a ring, and this device has its weights in registers"
            )
