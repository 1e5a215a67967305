"""What a rank has of its device, and what devices of a kind want of a kernel."""

from dataclasses import dataclass

import kccl

from ..model.program import Program
from .shape import SHARED_BYTES


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What devices of a kind want of a kernel.

    Attributes:
        warps: That multiply: numbers with which a thread has the registers that the products need.
            The first choice first.
        warps_together: Warps that can give each other registers; 1: none can.
        weights_in_registers: Whether each warp loads its weights ahead into registers, a stage at
            a time. If not, a ring of stages is in block-shared memory.
        least_stage_bytes: Of weights: smaller stages of a ring cost more to hand over than to
            multiply; smaller ones in registers leave the memory idle.
        most_stage_bytes: Of weights.
        bytes_in_flight: Most bytes of weights that a ring's copies move at the same time, when the
            block multiplies the product that is copied.
        quiet_bytes: The same before: fewer, because exchanges wait behind copies.
        quietest_bytes: The same for short layers: the copies of one fill the ring during its
            exchanges.
        short_layer_bytes: A layer of an ordinary model is short if a block's weights of it have at
            most so many bytes.
        bytes_per_ns: What a block reads of its weights in a nanosecond.
        chunk: Positions of a prompt that run at the same time; 1: as decoding does.
        chunk_warps: Warps of a block that compute then: numbers with which a thread has the
            registers that it needs. The first choice first.
        chunk_steps: Of a stage of vectors.
        vectors: That a multiplication of kernels/mma.cuh takes.
        most_strands: Of a KV head.
    """

    warps: tuple[int, ...] = (8, 6, 4)
    warps_together: int = 4
    weights_in_registers: bool = False
    least_stage_bytes: int = 12 << 10
    most_stage_bytes: int = 24 << 10
    bytes_in_flight: int = 96 << 10
    quiet_bytes: int = 40 << 10
    quietest_bytes: int = 16 << 10
    short_layer_bytes: int = 256 << 10
    bytes_per_ns: int = 35
    chunk: int = 64
    chunk_warps: tuple[int, ...] = (12, 8)
    chunk_steps: int = 6
    vectors: int = 4
    most_strands: int = 64


NVIDIA = Kind()
"""By measurement on one H200 (bench/LOG.md). short_layer_bytes is by measurement on one H100: with
quietest_bytes, layers of 238 KB a block are faster, of 54 KB as fast, of 921 KB slower."""

AMD = Kind(
    # Two waves on each of four SIMDs: with a third one, threads would keep registers in memory.
    warps=(6, 4),
    warps_together=1,
    # A stage is all that is on its way: 16 or 24 KB. A compute unit reads 17 bytes a nanosecond,
    # and a load takes 0.8 to 1 microsecond. With more, threads would keep registers in memory.
    weights_in_registers=True,
    least_stage_bytes=14 << 10,
    most_stage_bytes=24 << 10,
    bytes_per_ns=17,
    chunk=8,
    chunk_warps=(7,),
    chunk_steps=8,
    vectors=8,
)
"""By the code that clang makes for gfx942 and by published numbers. Nothing was measured."""

SIMULATED = Kind(warps_together=1, chunk=1)
"""Simulated blocks cost real time: a prompt runs as decoding does."""

_KINDS = {"cuda": NVIDIA, "hip": AMD, "sim": SIMULATED}


@dataclass(frozen=True)
class Machine:
    """What a rank may use of its device.

    Attributes:
        multiprocessors: Each runs one block.
        shared_bytes: Of a block's shared memory.
        kind: Of the device.
    """

    multiprocessors: int
    shared_bytes: int = SHARED_BYTES
    kind: Kind = NVIDIA


def machine_of(comm: kccl.Communicator, program: Program) -> Machine:
    """This rank's share of its device. Collective.

    Ranks that are threads of one process may share a GPU.
    """
    kind = _KINDS[comm.backend]
    if comm.backend == "sim":
        # As few blocks as the model can have.
        return Machine(num_groups(program, comm.world_size), kind=kind)
    device = kccl.gpu.device(comm.empty(1).device)
    uuids = comm.gather_objects(device.uuid)
    return Machine(device.multiprocessors // uuids.count(device.uuid), device.shared_bytes, kind)


def num_groups(program: Program, world_size: int) -> int:
    """Residuals of a rank: its blocks are cut into so many groups."""
    return 1 if program.num_residuals == 1 else program.most_lanes(world_size)
