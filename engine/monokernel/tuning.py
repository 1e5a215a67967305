"""Chooses how the monokernel uses a machine: shape.Tuning."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import kccl

from ..config import ModelConfig
from ..program import Program
from .shape import SHARED_BYTES, TILE, Tuning

_TILE_BYTES = 2 * TILE * TILE
# Of each block, by measurement on one H200 (bench/LOG.md): what the memory needs to be busy, and
# less while the ring has enough, because exchanges wait behind copies.
_BYTES_IN_FLIGHT, _QUIET_BYTES = 72 << 10, 40 << 10
# Smaller stages cost more to hand over than to multiply.
_LEAST_STAGE_BYTES, _MOST_STAGE_BYTES = 12 << 10, 24 << 10
# A thread of so many warps has as many registers as the products need: the first choice first.
_WARPS = (8, 6, 4)
_MOST_STEPS = 8
_MOST_STAGES = 16
_STRANDS = 64
# Residuals begin a round at so many moments. They are a sixth of a layer apart, and at most as long
# as a full ring feeds a block. A block reads 35 bytes of weights a nanosecond on one H200.
_STAGGERS, _STAGGERS_OF_LAYER, _BYTES_PER_NS = 4, 6, 35
# Of all ranks. At a round's end a thread of 32 waits for a word of each 32nd block, and has 32 bits
# to tell them apart (Waiter::await in kernels/watch.cuh).
_MOST_BLOCKS = 32 * 32
# Of prefill. Attention has its parts where the vectors' ring is.
_CHUNK_WARPS, _CHUNK_STEPS, _CHUNK_STAGES = 12, 6, 5


@dataclass(frozen=True)
class Machine:
    """What a rank may use of its device.

    Attributes:
        multiprocessors: Each runs one block.
        shared_bytes: Of a block's shared memory.
        chunk: Positions of a prompt that run at the same time.
    """

    multiprocessors: int
    shared_bytes: int = SHARED_BYTES
    chunk: int = 64


def num_groups(program: Program, world_size: int) -> int:
    """Residuals of a rank: its blocks are cut into so many groups."""
    return 1 if program.num_residuals == 1 else program.most_lanes(world_size)


def machine_of(comm: kccl.Communicator, program: Program) -> Machine:
    """This rank's share of its device. Collective.

    Ranks that are threads of one process may share a GPU.
    """
    if comm.backend == "sim":
        # Simulated blocks cost real time: as few as the model can have.
        return Machine(num_groups(program, comm.world_size), chunk=1)
    device = kccl.gpu.device(comm.empty(1).device)
    uuids = comm.gather_objects(device.uuid)
    return Machine(
        device.multiprocessors // uuids.count(device.uuid),
        kccl.gpu.attribute(device.ordinal, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


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
        InvalidArgument: The machine has too few multiprocessors, or cannot run so many blocks; or
            all ranks together would have too many.
    """
    c = program.config
    lanes = program.most_lanes(world_size)
    groups = num_groups(program, world_size)
    most = min(machine.multiprocessors, _MOST_BLOCKS // world_size)
    if blocks is None:
        # A block without a row of the longest product would only wait.
        longest = max(rows for rows, _, _ in _products(c, lanes // groups)) // TILE
        blocks = min(most // groups, longest) * groups
    if not 0 < blocks <= most or blocks % groups:
        raise kccl.InvalidArgument(
            f"blocks is {blocks}, must be a multiple of the rank's {groups} residuals, and at most "
            f"{most}: the rank has {machine.multiprocessors} multiprocessors, and {world_size} "
            f"ranks have at most {_MOST_BLOCKS} blocks"
        )
    warps, steps = _warps_and_steps(program, world_size)
    stage = steps * warps * _TILE_BYTES
    splits = _splits(program, lanes // groups, blocks // groups, warps)
    staggers = groups > 1 and machine.chunk > 1
    units = lanes // groups * c.num_kv_heads // c.num_lanes * splits
    return Tuning(
        blocks=blocks,
        warps=warps,
        stages=_MOST_STAGES,
        stage_steps=steps,
        in_flight=max(1, round(_QUIET_BYTES / stage)),
        hungry_in_flight=max(1, _BYTES_IN_FLIGHT // stage),
        strands=_STRANDS,
        splits=splits,
        # A block without attention would poll for all parts while the others work.
        merges_first=units < blocks // groups,
        shared_bytes=machine.shared_bytes,
        stagger_ns=_stagger_ns(program, lanes, blocks, machine.shared_bytes) if staggers else 0,
        staggers=_STAGGERS,
        # Whole groups of four, which can give each other registers.
        others=-(warps + 2) % 4 + 2 if machine.chunk > 1 else 2,
        chunk=machine.chunk,
        chunk_others=-(_CHUNK_WARPS + 1) % 4 + 1,
        chunk_warps=_CHUNK_WARPS,
        chunk_stages=_chunk_stages(c, machine.chunk),
        chunk_steps=_CHUNK_STEPS,
    )


def _products(c: ModelConfig, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Rows, columns of a lane and lanes of the layers' products, for a group of lanes."""
    heads, kv_heads = c.num_heads // c.num_lanes, c.num_kv_heads // c.num_lanes
    ffn = c.ffn // c.num_lanes
    yield lanes * (heads + 2 * kv_heads) * c.head_dim, c.hidden, 1
    yield c.hidden, heads * c.head_dim, lanes
    yield 2 * lanes * ffn, c.hidden, 1
    yield c.hidden, ffn, lanes


def _warps_and_steps(program: Program, world_size: int) -> tuple[int, int]:
    """The warps that pad the model least, and the steps of a stage. The warps change bits, so they
    depend on the model alone.
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
            for num in range(1, min(_MOST_STEPS, _MOST_STAGE_BYTES // (warps * _TILE_BYTES)) + 1)
            if all(each % num == 0 or num % each == 0 for each in all_steps)
        )

    def key(warps: int) -> tuple[bool, int]:
        is_small = steps(warps, [most_lanes]) * warps * _TILE_BYTES < _LEAST_STAGE_BYTES
        return is_small, padded(warps)

    is_ordinary = program.num_residuals == 1
    numbers = {len(program.lanes_of(rank, world_size)) for rank in range(world_size)}
    most_lanes = c.num_lanes if is_ordinary else 1
    warps = min(_WARPS, key=key)
    return warps, steps(warps, numbers if is_ordinary else [1])


def _splits(program: Program, lanes: int, blocks: int, warps: int) -> int:
    """Splits of each KV head's strands: as many as there are blocks, unless a block has a warp for
    each of its strands already.
    """
    kv_heads = lanes * program.config.num_kv_heads // program.config.num_lanes
    splits = 1
    while splits * warps < _STRANDS and 2 * splits * kv_heads <= blocks:
        splits *= 2
    return splits


def _stagger_ns(program: Program, lanes: int, blocks: int, shared_bytes: int) -> int:
    weights = sum(rows * columns * each for rows, columns, each in _products(program.config, lanes))
    of_layer = 2 * weights // blocks // _STAGGERS_OF_LAYER
    return min(of_layer, shared_bytes) // _BYTES_PER_NS


def _chunk_stages(c: ModelConfig, chunk: int) -> int:
    """Enough for all strands' parts of four queries, and of eight nodes above them."""
    stage = _CHUNK_STEPS * chunk * TILE * 4
    parts = (_STRANDS + 8) * 4 * (c.head_dim + 4) * 4
    return max(_CHUNK_STAGES, -(-parts // stage))
