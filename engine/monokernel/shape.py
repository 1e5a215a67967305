"""What of a model and a machine is compiled into the monokernel: kernels/shape.cuh calls it S."""

from dataclasses import dataclass
from pathlib import Path

import kccl

from ..program import Program

KERNELS = Path(__file__).parents[1] / "kernels"
TILE = 16
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
        in_flight: Stages that are copied at the same time.
        hungry_in_flight: The same while more than half of the ring is empty; 0: as many.
        strands: Into how many parts the positions of a KV head are cut, a power of two.
        splits: Into how many parts the strands are cut, one for each block; a power of two.
        others: Warps of a block that do not multiply: one copies, one collects messages.
        shared_bytes: Of a block's shared memory. The ring has as many stages as fit.
        stagger_ns: The blocks of residual i begin i % staggers times so much later than the first.
        staggers: See stagger_ns.
        ablated: What is left out to learn what it costs, as bits of Ablation in kernels/task.cuh.
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
    hungry_in_flight: int = 0
    others: int = 2
    shared_bytes: int = SHARED_BYTES
    stagger_ns: int = 0
    staggers: int = 1
    ablated: int = 0
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
        f"vocab_size / {world_size} ranks": c.vocab_size // world_size,
    }
    for name, size in rows.items():
        if size % TILE:
            raise kccl.InvalidArgument(
                f"{name} is {size}, must be a multiple of {TILE} for the monokernel"
            )
    if c.num_lanes % world_size or c.vocab_size % world_size:
        raise kccl.InvalidArgument(
            f"world_size is {world_size}, must divide the model's {c.num_lanes} lanes and "
            f"{c.vocab_size} tokens for the monokernel"
        )
    if c.lm_head != "replicate":
        raise kccl.InvalidArgument(
            f"lm_head is {c.lm_head!r}, must be 'replicate' for the monokernel"
        )
    if c.head_dim > 128:
        raise kccl.InvalidArgument(f"head_dim is {c.head_dim}, must be at most 128")
    if lane_heads // lane_kv_heads > 4:
        raise kccl.InvalidArgument(
            f"num_heads / num_kv_heads is {lane_heads // lane_kv_heads}, must be at most 4 for the "
            "monokernel"
        )


def kernels_of(tuning: Tuning) -> list[str]:
    """The names of the kernels in source_of()."""
    return ["decode", "pack", "describe", *(["prefill"] if tuning.chunk > 1 else [])]


_PREFILL = """
KCCL_KERNEL_OF(kccl::decode::kPrefillThreads<Model>)
void prefill(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm,
             KCCL_KERNEL_PARAM(kccl::decode::Task) task) {
    kccl::decode::run_prefill<Model>(kccl::platform::first_parameter(comm), task);
}
"""


def source_of(
    program: Program,
    world_size: int,
    context: int,
    tuning: Tuning,
    *,
    samples: bool = False,
    traces: bool = False,
) -> str:
    """The translation unit: the kernels that kernels_of() names, for one shape.

    Args:
        program: The model's.
        world_size: Ranks that share it.
        context: Positions that the KV cache has room for.
        tuning: How a GPU is used.
        samples: Whether tokens are chosen as SamplingParams say. If not, the most likely ones are,
            and the ops have more registers. A source that samples has the kernel decode alone.
        traces: Whether the kernel notes the times of its ops.
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
        "HungryInFlight": tuning.hungry_in_flight or tuning.in_flight,
        "Strands": tuning.strands,
        "Splits": tuning.splits,
        "StaggerNs": tuning.stagger_ns,
        "Staggers": tuning.staggers,
        "Ablated": tuning.ablated,
        "Chunk": tuning.chunk,
        "ChunkWarps": tuning.chunk_warps,
        "ChunkOthers": tuning.chunk_others,
        "ChunkStages": tuning.chunk_stages,
        "ChunkSteps": tuning.chunk_steps,
        "NumLayers": c.num_layers,
        "NumLanes": lanes,
        "NumResiduals": program.num_residuals,
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
    floats = {"NormEps": c.norm_eps, "AttentionScale": c.attention_scale}
    members = [
        *(f"static constexpr uint32_t k{name} = {value};" for name, value in numbers.items()),
        *(f"static constexpr bool k{name} = {str(on).lower()};" for name, on in flags.items()),
        *(f"static constexpr float k{name} = {float(x):.9e}f;" for name, x in floats.items()),
    ]
    has_prefill = tuning.chunk > 1 and not samples
    prefill = _PREFILL if has_prefill else ""
    return f"""
#include "decode.cuh"
#include "pack.cuh"
#include "prefill.cuh"

struct Model {{
    {(chr(10) + "    ").join(members)}
}};

KCCL_KERNEL_OF(kccl::decode::kDecodeThreads<Model>)
void decode(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm, KCCL_KERNEL_PARAM(kccl::decode::Task) task) {{
    kccl::decode::run<Model>(kccl::platform::first_parameter(comm), task);
}}
{prefill}
KCCL_KERNEL void pack(uint16_t* weights, const uint16_t* matrix, uint64_t product, uint64_t layer,
                      uint64_t group) {{
    kccl::decode::pack<Model>(weights, matrix, product, layer, group);
}}

KCCL_KERNEL void describe(uint64_t* out) {{ kccl::decode::describe<Model>(out); }}
"""
