"""What of a model and a machine is compiled into the monokernel: kernels/shape.cuh calls it S."""

from dataclasses import dataclass
from pathlib import Path

import kccl

from ..base.core import lib
from ..model.program import Program
from .sequence import cases_of, sequence_of

KERNELS = Path(__file__).parents[1] / "kernels"
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


def check(program: Program, world_size: int) -> None:
    """Refuses a model that the monokernel cannot run.

    Raises:
        InvalidArgument: The text names what does not fit.
    """
    c = program.config
    lane_heads, lane_kv_heads = c.num_heads // c.num_lanes, c.num_kv_heads // c.num_lanes
    rows = {
        "hidden": c.hidden,
        "head_dim": c.head_dim,
        "ffn / num_lanes": c.ffn // c.num_lanes,
        **_head_rows(program, world_size),
    }
    for name, size in rows.items():
        if size % TILE:
            raise kccl.InvalidArgument(
                f"{name} is {size}, must be a multiple of {TILE} for the monokernel"
            )
    if world_size > c.num_lanes:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must be at most the model's {c.num_lanes} lanes for the "
            "monokernel"
        )
    if c.num_lanes % world_size and program.num_residuals > 1:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must divide the {c.num_lanes} lanes of a Laneformer for "
            "the monokernel; backend 'host' takes any number"
        )
    if c.vocab_size % world_size and program.num_head_parts == 1:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must divide the model's {c.vocab_size} tokens for the "
            "monokernel"
        )
    if c.head_dim > 128:
        raise kccl.InvalidArgument(f"head_dim is {c.head_dim}, must be at most 128")
    if lane_heads // lane_kv_heads > 8:
        raise kccl.InvalidArgument(
            f"num_heads / num_kv_heads is {lane_heads // lane_kv_heads}, must be at most 8 for the "
            "monokernel"
        )


def _head_rows(program: Program, world_size: int) -> dict[str, int]:
    """Rows of the head that are multiplied together."""
    vocab_size, parts = program.config.vocab_size, program.num_head_parts
    if parts > 1:
        return {f"vocab_size / {parts} lanes": vocab_size // parts}
    return {f"vocab_size / {world_size} ranks": vocab_size // world_size}


# Device types of weights.
_WEIGHTS = {"bfloat16": "bf16", "float16": "f16"}


def kernels_of(tuning: Tuning, *, traces: bool = False) -> list[str]:
    """The names of the kernels in source_of()."""
    prefill = ["prefill"] if tuning.chunk > 1 else []
    return ["decode", "pack", "describe", *prefill, *(["describe_trace"] if traces else [])]


_PREFILL = """
KCCL_KERNEL_OF(kccl::decode::kPrefillThreads<Model>)
void prefill(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm,
             KCCL_KERNEL_PARAM(kccl::decode::Task) task) {
    using namespace kccl::platform;
    kccl::decode::run_prefill<Model>(first_parameter(comm), second_parameter(comm, task));
}
"""

_TRACE = """
KCCL_KERNEL void describe_trace(KcclDecodeTraceSizes* out) {
    kccl::decode::describe_trace<Model>(out);
}
"""


def source_of(
    program: Program,
    world_size: int,
    context: int,
    tuning: Tuning,
    dtype: str = "bfloat16",
    *,
    rank: int = 0,
    samples: bool = False,
    traces: bool = False,
    overlaps: bool = True,
) -> str:
    """The translation unit: the kernels that kernels_of() names, for one shape.

    Args:
        program: The model's.
        world_size: Ranks that share it.
        context: Positions that the KV cache has room for.
        tuning: How a GPU is used.
        dtype: Of the weights: a name in _WEIGHTS.
        rank: Whose kernels. Those of ranks with equally many lanes are the same.
        samples: Whether tokens are chosen as SamplingParams say. If not, the most likely ones are,
            and the ops have more registers. A source that samples has the kernel decode alone.
        traces: Whether the kernel notes the times of its ops. Then there is describe_trace, too.
        overlaps: Whether anything happens at the same time as something else. If not, all blocks of
            all ranks wait for each other behind each op, and a stage of weights is copied when all
            warps wait for it. The results have the same bits. Such a source has the kernel decode
            alone, too.
    """
    c = program.config
    lanes = c.num_lanes
    numbers = {
        "WorldSize": world_size,
        "Blocks": tuning.blocks,
        "Warps": tuning.warps,
        "Others": tuning.others,
        "MostStages": tuning.stages,
        "SharedBytes": tuning.shared_bytes,
        "StageSteps": tuning.stage_steps,
        "InFlight": tuning.in_flight,
        "UrgentInFlight": tuning.urgent_in_flight or tuning.in_flight,
        "Strands": tuning.strands,
        "Splits": tuning.splits,
        "StaggerNs": tuning.stagger_ns,
        "Staggers": tuning.staggers,
        "DelayNs": tuning.delay_ns,
        "Ablated": tuning.ablated,
        "Chunk": tuning.chunk,
        "ChunkWarps": tuning.chunk_warps,
        "ChunkOthers": tuning.chunk_others,
        "ChunkStages": tuning.chunk_stages,
        "ChunkSteps": tuning.chunk_steps,
        "NumLayers": c.num_layers,
        "NumLanes": lanes,
        "LanesHere": len(program.lanes_of(rank, world_size)),
        "NumResiduals": program.num_residuals,
        "NumHeadParts": program.num_head_parts,
        "Hidden": c.hidden,
        "Heads": c.num_heads // lanes,
        "KvHeads": c.num_kv_heads // lanes,
        "HeadDim": c.head_dim,
        "Ffn": c.ffn // lanes,
        "Vocab": c.vocab_size,
        "Context": context,
    }
    flags = {"HasQkNorm": c.has_qk_norm, "RoundsMessages": c.message_dtype == "bfloat16"}
    flags["HasBlocking"] = any(op.is_blocking for op in program.ops)
    flags["HasDelayed"] = any(op.receives is not None for op in program.ops)
    flags |= {"Samples": samples, "Traces": traces}
    flags |= {"Overlaps": overlaps, "MergesFirst": tuning.merges_first}
    flags["WeightsInRegisters"] = tuning.weights_in_registers
    floats = {"NormEps": c.norm_eps, "AttentionScale": c.attention_scale}
    members = [
        f"using Weight = kccl::{_WEIGHTS[dtype]};",
        *(f"static constexpr uint32_t k{name} = {value};" for name, value in numbers.items()),
        f"static constexpr int kSlowRank = {tuning.slow_rank};",
        *(f"static constexpr bool k{name} = {str(on).lower()};" for name, on in flags.items()),
        *(f"static constexpr float k{name} = {float(x):.9e}f;" for name, x in floats.items()),
    ]
    has_prefill = tuning.chunk > 1 and not samples and overlaps
    prefill = _PREFILL if has_prefill else ""
    trace = _TRACE if traces else ""
    return f"""
{cases_of(program)}

#include "decode.cuh"
#include "pack.cuh"
#include "prefill.cuh"
#include "trace_layout.cuh"
{sequence_of(program)}
struct Model : Ops {{
    {(chr(10) + "    ").join(members)}
}};

KCCL_KERNEL_OF(kccl::decode::kDecodeThreads<Model>)
void decode(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm, KCCL_KERNEL_PARAM(kccl::decode::Task) task) {{
    using namespace kccl::platform;
    kccl::decode::run<Model>(first_parameter(comm), second_parameter(comm, task));
}}
{prefill}
KCCL_KERNEL void pack(uint16_t* weights, const uint16_t* matrix, uint64_t product, uint64_t layer,
                      uint64_t group) {{
    kccl::decode::pack<Model>(weights, matrix, product, layer, group);
}}

KCCL_KERNEL void describe(KcclDecodeSizes* out) {{ kccl::decode::describe<Model>(out); }}
{trace}"""
