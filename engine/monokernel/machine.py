"""Describes the part of its device that a rank may use, and how kernels use each kind of device."""

from dataclasses import dataclass

import kccl

from ..base.core import lib
from ..model.program import Program
from .shape import SHARED_BYTES


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How kernels use devices of a kind.

    Attributes:
        warps: How many consumer warps a block may have: numbers with which a thread has the
            registers that the products need. The first choice comes first.
        warps_together: The number of warps that can give each other registers; 1: none can.
        weights_in_registers: Whether each warp loads its weights ahead into registers, a stage at
            a time. If not, a ring of stages is in block-shared memory.
        least_stage_bytes: The fewest bytes of a stage of weights. Smaller stages of a ring cost
            more to hand over than to multiply; smaller ones in registers leave the memory idle.
        most_stage_bytes: The most bytes of a stage of weights.
        bytes_in_flight: The most bytes of weights that a ring's copies move at the same time, when
            the block multiplies the product that is copied.
        quiet_bytes: The most bytes that they move at other times: fewer, because exchanges wait
            behind copies.
        quietest_bytes: The same limit for short layers. The copies of a short layer fill the ring
            during its exchanges.
        short_layer_bytes: A layer of an ordinary model is short if a block has at most so many
            bytes of its weights.
        bytes_per_ns: The bytes of weights that a block reads in a nanosecond.
        chunk: Positions of a prompt that run at the same time; 1: one by one, as decoding does.
        chunk_warps: How many consumer warps a block may have in prefill: numbers with which a
            thread has the registers that it needs. The first choice comes first.
        chunk_steps: The steps of a stage of vectors in prefill.
        vectors: The number of vectors that a multiplication of kernels/mma.cuh takes.
        most_kv_strands: The most KV strands of a KV head.
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
    vectors: int = lib.kKcclDecodeVectors
    most_kv_strands: int = 64


NVIDIA = Kind()
"""By measurement on one H200 (bench/LOG.md). short_layer_bytes is by measurement on one H100: with
quietest_bytes, layers of 238 KB a block are faster, of 54 KB as fast, of 921 KB slower."""

AMD = Kind(
    # Each of four SIMDs runs two waves. With a third one, threads would spill registers to memory.
    warps=(6, 4),
    warps_together=1,
    # A stage is all the data that is on its way: 16 or 24 KB. A compute unit reads 17 bytes a
    # nanosecond, and a load takes 0.8 to 1 microsecond. With more, threads would spill registers to
    # memory.
    weights_in_registers=True,
    least_stage_bytes=14 << 10,
    most_stage_bytes=24 << 10,
    bytes_per_ns=17,
    chunk=8,
    chunk_warps=(7,),
    chunk_steps=8,
    vectors=lib.kKcclDecodeVectorsOnAmd,
)
"""By the code that clang makes for gfx942 and by published numbers. Nothing was measured."""

SIMULATED = Kind(warps_together=1, chunk=1)
"""Simulated blocks cost real time: a prompt runs as decoding does."""

_KINDS = {"cuda": NVIDIA, "hip": AMD, "sim": SIMULATED}


@dataclass(frozen=True)
class Machine:
    """The part of a device that a rank may use.

    Attributes:
        multiprocessors: Their number. Each runs one block.
        shared_bytes: The bytes of a block's shared memory.
        kind: The kind of device.
    """

    multiprocessors: int
    shared_bytes: int = SHARED_BYTES
    kind: Kind = NVIDIA


def machine_of(comm: kccl.Communicator, program: Program) -> Machine:
    """Returns this rank's share of its device. Collective.

    Ranks that are threads of one process may share a GPU.
    """
    kind = _KINDS[comm.backend]
    if comm.backend == "sim":
        # The simulator has only as many blocks as the model can use.
        return Machine(num_groups(program, comm.world_size), kind=kind)
    device = kccl.gpu.device(comm.empty(1).device)
    uuids = comm.gather_objects(device.uuid)
    return Machine(device.multiprocessors // uuids.count(device.uuid), device.shared_bytes, kind)


def num_groups(program: Program, world_size: int) -> int:
    """Returns the number of residuals of a rank. Its blocks are cut into so many groups."""
    return 1 if program.num_residuals == 1 else program.most_lanes(world_size)
