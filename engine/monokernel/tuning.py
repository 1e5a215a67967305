"""Chooses how the monokernel uses a machine: shape.Tuning."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import gcd

import kccl

from ..base.core import lib
from ..model.ops import KINDS
from ..model.program import Program
from .chunks import (
    chunk_shares,
    chunk_stages,
    chunk_warps,
    fitted_to_memory,
    kv_strands_for,
    squads_for,
)
from .layout import (
    TILE,
    Product,
    has_scales,
    head_of,
    is_in_place,
    least_tile_bytes,
    products_of,
    stage_bytes,
)
from .machine import Kind, Machine, num_groups
from .shape import Tuning

# The most bytes of weights that a warp has of a stage. Its threads hold them in registers, with
# those of the next stage.
_MOST_OF_WARP = 8 * 512
# A mixture of experts has this limit, too: with the registers for scales, of which each thread has
# some for each strip. With 24 steps gpt-oss's kernel spilled 3.6 KB a thread (bench/LOG.md). Where
# each of a multiprocessor's parts has one consumer warp, threads have enough registers.
_MOST_WITH_SCALES, _REGISTER_OF_WARP = 36 * 128, 128
# In formats with scales, numbers of warps are as good as each other if their bytes differ by less
# than the share (_SAME_TILE / a tile's bytes) ** 2. The smaller tiles are, the more the time is the
# warps' and not the memory's. The number is fitted to Laneformer 2B on one H200 (bench/LOG.md):
# with 26 to 36 it has 6 warps in FP8 and more in 4 bits.
_SAME_TILE = 35
# In a mixture of experts they are as good if their bytes differ by less than this share: more warps
# hide more of each other's waits (bench/LOG.md).
_SAME_IN_MIXTURE = 1 / 8
# The most tiles that share scales. No group of columns is longer.
_STRIP_TILES = 8
# Stages that are multiplied where they lie need not divide a product's steps, if parts of so many
# steps do (kPart in kernels/product_in_place.cuh).
_PART = 8
_MOST_STAGES = 16
# The stages that are copied before a router's choice is known (kernels/pool_order.cuh). They are
# few, because the experts' stages have only the other slots (bench/LOG.md).
_PARKED = 1
# The most different delays with which residuals begin a token step. Two delays differ by a sixth of
# a layer, or by half a layer if the rank has two residuals. No difference is longer than the
# weights that are loaded ahead last.
_STAGGERS, _STAGGERS_OF_LAYER, _PAIR = 4, 6, 2
# The KV strands of an ordinary model are divided among blocks until a KV split has so many, those
# of a Laneformer until it has _LANE_KV_STRANDS. They are divided at least once, if blocks are left.
_LEAST_KV_STRANDS, _LANE_KV_STRANDS = 4, 8
# The most blocks of all ranks. Where one warp waits for all of them, each of 32 threads waits for
# every 32nd block, and has 32 bits to tell them apart (Waiter::await in kernels/watch.cuh).
_MOST_BLOCKS: int = lib.kKcclDecodeMostBlocks


def tuning_for(
    program: Program, world_size: int, machine: Machine, blocks: int | None = None
) -> Tuning:
    """Returns how a machine runs a model.

    Args:
        program: The model's program.
        world_size: Number of ranks.
        machine: The part of a device that each rank has.
        blocks: The blocks of each rank; None: as many as have work.

    Raises:
        InvalidArgument: The machine has too few multiprocessors, or cannot run so many blocks; a
            block would have no row; or all ranks together would have too many blocks.
    """
    c = program.config
    lanes = program.most_lanes(world_size)
    groups = num_groups(program, world_size)
    most = min(machine.multiprocessors, _MOST_BLOCKS // world_size)
    # A block that has no row of a layer's longest product would only wait.
    longest = max(each.rows for each in products_of(program, lanes // groups)) // TILE
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
    strip_tiles = _strip_tiles(program, kind, warps)
    stage = stage_bytes(program, warps, steps, strip_tiles)
    ahead = stage if kind.weights_in_registers else machine.shared_bytes
    if c.experts is not None:
        kind = replace(kind, chunk=kind.chunk_of_experts, chunk_steps=kind.chunk_steps_of_experts)
    has_chunks = kind.chunk > 1
    kv_strands = kind.most_kv_strands
    if has_chunks:
        kv_strands = kv_strands_for(c, kind, machine.shared_bytes)
    kv_heads = lanes // groups * c.num_kv_heads // c.num_lanes
    block_bytes = sum(each.nbytes for each in products_of(program, lanes)) // blocks
    # In a Laneformer other lanes' work hides the time of attention. More KV splits would only mean
    # more polling.
    least = min(_LANE_KV_STRANDS, kv_strands // 2) if groups > 1 else _LEAST_KV_STRANDS
    if c.experts is not None and kv_strands < kind.most_kv_strands:
        least = kind.kv_strands_of_experts
    kv_splits = _kv_splits(kv_heads, blocks // groups, kv_strands, least)
    if c.experts is not None and has_chunks:
        of_residual = lanes // groups, blocks // groups
        kind = fitted_to_memory(program, of_residual, kind, warps, kv_strands, machine.shared_bytes)
    of_lanes = c.num_lanes, lanes // groups
    squads = squads_for(program, of_lanes, blocks // groups, kind) if has_chunks else 1
    warps_of_chunk = chunk_warps(program, lanes // groups, blocks // groups, kind)
    return Tuning(
        blocks=blocks,
        warps=warps,
        stages=_MOST_STAGES,
        stage_steps=steps,
        strip_tiles=strip_tiles if has_scales(program) else 1,
        in_flight=max(1, round(_quiet_bytes(program, block_bytes, kind) / stage)),
        urgent_in_flight=max(1, kind.bytes_in_flight // stage),
        parked=_PARKED if c.experts is not None and not kind.weights_in_registers else 0,
        kv_strands=kv_strands,
        kv_splits=kv_splits,
        # A block without a work item of attention would meanwhile poll for all partial results.
        # With two residuals that costs less than one more exchange.
        merges_first=kv_heads * kv_splits < blocks // groups and groups != _PAIR,
        shared_bytes=machine.shared_bytes,
        stagger_ns=_stagger_ns(program, groups, block_bytes, kind, ahead) if has_chunks else 0,
        staggers=_STAGGERS,
        weights_in_registers=kind.weights_in_registers,
        others=-(warps + 2) % kind.warps_together + 2,
        chunk=kind.chunk if has_chunks else 1,
        chunk_least=kind.chunk_least_of_experts if c.experts is not None else 1,
        chunk_others=-(warps_of_chunk + 1) % kind.warps_together + 1,
        chunk_warps=warps_of_chunk,
        chunk_stages=chunk_stages(c, kind, kv_strands),
        chunk_steps=kind.chunk_steps,
        chunk_shares=chunk_shares(kind) if c.experts is not None else 1,
        squads=squads,
        squad_warps=kind.squad_warps,
        squad_others=-(kind.squad_warps + 1) % kind.warps_together + 1,
        squad_stages=kind.squad_stage_bytes // (kind.squad_steps * kind.chunk * TILE * 4),
        squad_steps=kind.squad_steps,
        squad_rows=kind.squad_rows,
    )


def _strip_tiles(program: Program, kind: Kind, warps: int) -> int:
    """Returns the most tiles that share scales. Where weights are in registers, a stage is loaded
    before its product is known. So all products of a layer then have strips of one length, but
    those of experts, which are loaded later.
    """
    most = _STRIP_TILES
    if not kind.weights_in_registers:
        return most
    alike = [each for each in products_of(program, 1) if not KINDS[each.kind].has_experts]
    while len({each.strip_tiles(warps, most) for each in alike}) > 1:
        most //= 2
    return most


def _warps_and_steps(program: Program, world_size: int, kind: Kind) -> tuple[int, int]:
    """Returns the number of warps that pads the model least, and the steps of a stage. The warps
    change bits, so they depend only on the model and the kind of device.
    """
    num_lanes, tile_bytes = program.config.num_lanes, least_tile_bytes(program)

    def padded(warps: int) -> int:
        """Returns the bytes of a layer, including zeros that make all warps' parts equally long."""
        products = products_of(program, num_lanes)
        strip_tiles = _strip_tiles(program, kind, warps)
        return sum(each.packed_bytes(warps, strip_tiles) for each in products)

    def steps(warps: int, numbers: Collection[int]) -> int:
        """Returns the largest number of steps of whole strips that divides each product's steps,
        or is a multiple of them; if there is none, the largest one with which stages of the other
        products have whole row tiles and lanes; or the largest one of whole strips.
        """
        products = [each for lanes in numbers for each in products_of(program, lanes)]
        products.append(head_of(program))
        strip_tiles = _strip_tiles(program, kind, warps)

        most = min(_MOST_OF_WARP // tile_bytes, kind.most_stage_bytes // (warps * tile_bytes))
        if program.config.experts is not None and warps > kind.warps_together:
            most = min(most, _most_steps(products, warps, tile_bytes))
        whole = [
            num
            for num in range(1, most + 1)
            if all(
                each.stage_steps(num, tile_bytes) % each.strip_tiles(warps, strip_tiles) == 0
                for each in products
            )
        ]

        def fits(each: Product, num: int) -> bool:
            own = each.stage_steps(num, tile_bytes)
            of_row = each.steps(warps, strip_tiles)
            is_short = is_in_place(program, each) and not kind.weights_in_registers
            if is_short and gcd(own, of_row) % _PART == 0:
                return True
            all_steps = each.lanes * of_row
            return all_steps % own == 0 or own % all_steps == 0

        def has_rows(each: Product, num: int) -> bool:
            return each.stage_steps(num, tile_bytes) % each.steps(warps, strip_tiles) == 0

        even = [num for num in whole if all(fits(each, num) for each in products)]
        of_rows = [
            num for num in whole if all(fits(each, num) or has_rows(each, num) for each in products)
        ]
        return max(even or of_rows or whole)

    def key(warps: int) -> tuple[bool, int]:
        is_small = steps(warps, [most_lanes]) * warps * tile_bytes < kind.least_stage_bytes
        # Fewer warps have longer strips with fewer scales, which is not worth a slower product.
        share = (_SAME_TILE / tile_bytes) ** 2 if has_scales(program) else 0
        if program.config.experts is not None:
            share = max(share, _SAME_IN_MIXTURE)
        unit = max(1, int(least * share))
        return is_small, (padded(warps) - least) // unit

    has_4_bits = all(
        each.format.tile_bytes <= TILE * TILE // 2 for each in products_of(program, num_lanes)
    )
    choices = kind.warps_of_4_bits if has_4_bits else kind.warps
    if program.config.experts is not None:
        choices = kind.warps_of_experts or choices
    is_ordinary = program.num_residuals == 1
    numbers = {len(program.lanes_of(rank, world_size)) for rank in range(world_size)}
    most_lanes = num_lanes if is_ordinary else 1
    least = min(map(padded, choices))
    warps = min(choices, key=key)
    return warps, steps(warps, numbers if is_ordinary else [1])


def _most_steps(products: Sequence[Product], warps: int, least: int) -> int:
    """Returns the most steps of a stage, in tiles of `least` bytes, for whose tiles and scales a
    mixture's threads have registers. In them, stages of all formats have as many bytes.
    """

    def held(each: Product) -> float:
        """Returns the bytes of registers that a warp needs for a tile and its share of scales."""
        if not each.format.scale_bytes:
            return each.format.tile_bytes
        # Scales of one byte stay together, others become FP32.
        registers = 1 if each.format.scale_bytes == TILE else 2 + each.format.has_zeros
        strip = each.strip_tiles(warps, _STRIP_TILES)
        return each.format.tile_bytes + registers * _REGISTER_OF_WARP / strip

    most = min(_MOST_WITH_SCALES * each.format.tile_bytes / held(each) for each in products) / least
    unit = max(each.format.tile_bytes for each in products) // least
    return int(most) // unit * unit


def _kv_splits(kv_heads: int, blocks: int, kv_strands: int, least: int) -> int:
    """Returns the KV splits of each KV head: as many as there are blocks. KV splits of `least` KV
    strands or fewer are not halved.
    """
    kv_splits = 1
    while kv_splits * least < kv_strands and 2 * kv_splits * kv_heads <= blocks:
        kv_splits *= 2
    return kv_splits


def _quiet_bytes(program: Program, block_bytes: int, kind: Kind) -> int:
    """Returns the most bytes in flight before a block multiplies. `block_bytes`: the block's
    weights of one layer.
    """
    may_be_short = program.num_residuals == 1 or has_scales(program)
    is_short = may_be_short and block_bytes <= kind.short_layer_bytes
    return kind.quietest_bytes if is_short else kind.quiet_bytes


def _stagger_ns(program: Program, groups: int, block_bytes: int, kind: Kind, ahead: int) -> int:
    """Returns Tuning.stagger_ns for a rank with so many residuals, whose blocks have `block_bytes`
    of a layer's weights, and have loaded `ahead` bytes ahead.
    """
    # In formats with scales, the chain of exchanges is the limit of several ranks, not the memory.
    if groups == 1 or (has_scales(program) and groups < program.num_residuals):
        return 0
    of_layer = block_bytes // (_PAIR if groups == _PAIR else _STAGGERS_OF_LAYER)
    return min(of_layer, ahead) // kind.bytes_per_ns
