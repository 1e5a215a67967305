"""Describes the part of its device that a rank may use, and how kernels use each kind of device."""

from dataclasses import dataclass

import kccl

from ..base.core import lib
from ..model.program import Program
from .shape import SHARED_BYTES


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How kernels use a kind of device.

    Attributes:
        warps: The numbers of consumer warps that a block may have, in order of preference. With
            each of them a thread has enough registers for the products.
        warps_of_4_bits: The same where all products of the layers have 4 bits a weight. Their warps
            are the limit, not the memory.
        warps_of_experts: The same in a mixture of experts, if they are others.
        warps_together: How many neighbouring warps execute setmaxnreg together, by which warps give
            registers to others. 1: the device cannot do that.
        weights_in_registers: Whether each warp loads a stage of its weights ahead into registers.
            If not, a ring of stages is in block-shared memory.
        least_stage_bytes: The fewest bytes of a stage of weights. With smaller stages, handing over
            a stage of a ring would cost more than multiplying it. In registers, too few bytes would
            be in flight.
        most_stage_bytes: The most bytes of a stage of weights.
        bytes_in_flight: The most bytes of weights that a ring's copies move at the same time, while
            the block multiplies the product that is copied.
        quiet_bytes: The same limit at other times. It is lower, because exchanges queue behind
            copies.
        quietest_bytes: quiet_bytes for short layers, whose exchanges run while copies still fill
            the ring.
        short_layer_bytes: A layer is short if a block has at most this many bytes of its weights.
            Only layers of ordinary models, and of formats with scales, may be short.
        bytes_per_ns: The bytes of weights that a block reads in a nanosecond.
        chunk: The positions of a prompt that run at the same time. 1: a prompt runs one position at
            a time, with the decode kernel.
        chunk_warps: The numbers of consumer warps that a block may have in prefill, in order of
            preference. With each of them a thread has enough registers.
        chunk_steps: The steps of a stage of vectors in prefill. A step is 16 elements of the
            vectors of all positions.
        chunk_of_experts, chunk_steps_of_experts: The same two numbers for a mixture of experts. The
            more positions a chunk has, the less often an expert's weights are read.
        chunk_least_of_experts: Tuning.chunk_least of a mixture of experts.
        chunk_share: The positions whose sums of the experts' last product a warp keeps in shared
            memory. A chunk has one or more such shares.
        squads: The most chunks that a residual's blocks run beside each other, each by a squad.
        squad_warps: The consumer warps of a block in prefill with several squads.
        squad_steps: chunk_steps with several squads.
        squad_rows: The row tiles that a warp of a squad multiplies at a time.
        squads_of_lane: `squads` where a residual has one lane, and so fewer blocks.
        squad_stage_bytes: The bytes of the stages of vectors then.
        vectors: The number of vectors that a multiplication of kernels/mma.cuh takes.
        most_kv_strands: The most KV strands of a KV head. With n strands, a strand is every n-th
            tile of 16 positions, and one warp goes over it.
        kv_strands_of_experts: A mixture's KV strands are divided among blocks until a KV split has
            so many.
    """

    warps: tuple[int, ...] = (8, 6, 4)
    warps_of_4_bits: tuple[int, ...] = (12, 8, 6, 4)
    warps_of_experts: tuple[int, ...] = ()
    warps_together: int = 4
    weights_in_registers: bool = False
    least_stage_bytes: int = 12 << 10
    most_stage_bytes: int = 24 << 10
    bytes_in_flight: int = 96 << 10
    quiet_bytes: int = 40 << 10
    quietest_bytes: int = 16 << 10
    short_layer_bytes: int = 288 << 10
    bytes_per_ns: int = 35
    chunk: int = 64
    chunk_warps: tuple[int, ...] = (12, 8)
    chunk_steps: int = 6
    chunk_of_experts: int = 256
    chunk_steps_of_experts: int = 1
    chunk_least_of_experts: int = 9
    chunk_share: int = 128
    squads: int = 8
    squad_warps: int = 8
    squad_steps: int = 4
    squad_rows: int = 2
    squads_of_lane: int = 4
    squad_stage_bytes: int = 112 << 10
    vectors: int = lib.kKcclDecodeVectors
    most_kv_strands: int = 64
    kv_strands_of_experts: int = 2


NVIDIA = Kind()
"""Measured on one H200 (bench/LOG.md). short_layer_bytes was measured on one H100: with
quietest_bytes, layers of 238 KB a block are faster, of 54 KB as fast, and of 921 KB slower. On four
H200, layers of 270 KB in FP8 are faster."""

AMD = Kind(
    # With these numbers each of a compute unit's four SIMDs runs two waves. With three, registers
    # would spill.
    warps=(6, 4),
    warps_of_4_bits=(6, 4),
    # The vectors of all experts of a position lie in block-shared memory. Beside them, the 64 KB of
    # an MI300X have no room for the areas of six warps, or for several partial results of
    # attention, in gpt-oss on one rank. With five warps its matrices need no tiles of zeros.
    warps_of_experts=(5, 4),
    kv_strands_of_experts=1,
    warps_together=1,
    # Only one stage is in flight. It must cover the latency of a load, 0.8 to 1 microsecond, at 17
    # bytes a nanosecond. So a stage has 16 or 24 KB. With more, registers would spill.
    weights_in_registers=True,
    least_stage_bytes=14 << 10,
    most_stage_bytes=24 << 10,
    bytes_per_ns=17,
    chunk=8,
    chunk_warps=(7,),
    chunk_steps=8,
    chunk_of_experts=32,
    chunk_steps_of_experts=2,
    chunk_least_of_experts=1,
    squads=1,
    squads_of_lane=1,
    vectors=lib.kKcclDecodeVectorsOnAmd,
)
"""Derived from the code that clang makes for gfx942 and from published numbers; not measured."""

SIMULATED = Kind(warps_of_4_bits=Kind.warps, warps_together=1, chunk=1, chunk_of_experts=1)
"""Prompts run with the decode kernel, because a prefill kernel would cost the simulator time. A
rank's one block has all rows, so shared memory has no room for the sums of 12 warps."""

_KINDS = {"cuda": NVIDIA, "hip": AMD}


@dataclass(frozen=True)
class Machine:
    """The part of a device that a rank may use.

    Attributes:
        multiprocessors: How many multiprocessors the rank may use. Each runs one block.
        shared_bytes: The bytes of a block's shared memory.
        kind: The kind of device.
    """

    multiprocessors: int
    shared_bytes: int = SHARED_BYTES
    kind: Kind = NVIDIA


def machine_of(comm: kccl.Communicator, program: Program) -> Machine:
    """Returns this rank's share of its device. Collective: all ranks must call it.

    Ranks that are threads of one process may share a GPU. They share its multiprocessors equally.
    """
    if comm.backend == "sim":
        return simulated_machine(program, comm.world_size)
    kind = _KINDS[comm.backend]
    device = kccl.gpu.device(comm.empty(1).device)
    uuids = comm.gather_objects(device.uuid)
    return Machine(device.multiprocessors // uuids.count(device.uuid), device.shared_bytes, kind)


def simulated_machine(program: Program, world_size: int) -> Machine:
    """Returns a rank's share of the simulator.

    A kernel needs at least one block for each lane group (the blocks that share a residual, see
    kernels/shape.cuh). In the simulator more blocks would only make the run slower, so a rank gets
    just that many multiprocessors.
    """
    return Machine(num_groups(program, world_size), kind=SIMULATED)


def num_groups(program: Program, world_size: int) -> int:
    """Returns the number of residuals of a rank, which is the number of its lane groups."""
    return 1 if program.num_residuals == 1 else program.most_lanes(world_size)
