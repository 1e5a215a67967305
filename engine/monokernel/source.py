"""Generates the monokernel's source for one model and machine: constants, ops, and kernels."""

from pathlib import Path

from ..model.program import Program
from .chunks import message_modules
from .layout import step_unit
from .other_tuning import with_seats
from .sequence import cases_of, formats_of, sequence_of
from .shape import Tuning

KERNELS = Path(__file__).parents[1] / "kernels"


def kernels_of(tuning: Tuning, *, traces: bool = False) -> list[str]:
    """Returns the names of the kernels in source_of()."""
    prefill = ["prefill"] if tuning.chunk > 1 else []
    if tuning.chunk > 1 and tuning.squads > 1:
        prefill += ["prefill_in_squads", "describe_squads"]
    trace = ["describe_trace"] if traces else []
    return ["decode", "pack", "copy_cache", "describe", "locate", *prefill, *trace]


_PREFILL = """
KCCL_KERNEL_OF(kccl::decode::kPrefillThreads<Model>)
void prefill(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm,
             KCCL_KERNEL_PARAM(kccl::decode::Task) task) {
    using namespace kccl::platform;
    kccl::decode::run_prefill<Model>(first_parameter(comm), second_parameter(comm, task));
}
"""

_SQUADS = """
struct ModelOfSquads : Model {{
    {members}
}};

KCCL_KERNEL_OF(kccl::decode::kPrefillThreads<ModelOfSquads>)
void prefill_in_squads(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm,
                      KCCL_KERNEL_PARAM(kccl::decode::Task) task) {{
    using namespace kccl::platform;
    kccl::decode::run_prefill<ModelOfSquads>(first_parameter(comm), second_parameter(comm, task));
}}

KCCL_KERNEL void describe_squads(KcclDecodeSizes* out) {{
    kccl::decode::describe<ModelOfSquads>(out);
}}
"""

_TRACE = """
KCCL_KERNEL void describe_trace(KcclDecodeTraceSizes* out) {
    kccl::decode::describe_trace<Model>(out);
}
"""


def _members(numbers: dict[str, int]) -> str:
    lines = (f"static constexpr uint32_t k{name} = {value};" for name, value in numbers.items())
    return "\n    ".join(lines)


def _of_squads(program: Program, tuning: Tuning) -> dict[str, int]:
    """Returns the numbers of a shape that differ in the kernel with squads."""
    return {
        "Squads": tuning.squads,
        "ChunkWarps": tuning.squad_warps,
        "ChunkOthers": tuning.squad_others,
        "ChunkStages": tuning.squad_stages,
        "ChunkSteps": tuning.squad_steps,
        "ChunkRows": tuning.squad_rows,
        "ChunkEach": tuning.squad_each,
        "MessageModules": message_modules(program, tuning.squads),
    }


def source_of(
    program: Program,
    world_size: int,
    context: int,
    tuning: Tuning,
    *,
    rank: int = 0,
    samples: bool = False,
    traces: bool = False,
    overlaps: bool = True,
    columns: int = 1,
    has_seats: bool = False,
) -> str:
    """Returns a translation unit with the kernels that kernels_of() names, for one shape.

    Args:
        program: The model's program.
        world_size: The number of ranks that share the model.
        context: The positions that a slot of the KV cache has room for.
        tuning: How a GPU is used.
        rank: The rank that will run the kernels. Only its number of lanes matters.
        samples: Whether decode chooses tokens as SamplingParams say. If False, it chooses the most
            likely ones, and its ops have more registers. If True, there is no prefill.
        traces: Whether decode records the times of its ops. Then there is describe_trace, too.
        overlaps: Whether computing, copying and exchanging happen at the same time. If False, all
            blocks of all ranks wait for each other after each op, and a stage of weights is copied
            when all warps wait for it. The results have the same bits, and there is no prefill.
        columns: The most positions that a token step of decode runs. With more than one there is no
            prefill.
        has_seats: Whether these are positions of different requests (kernels/seats.cuh).
    """
    c = program.config
    lanes = c.num_lanes
    if has_seats:
        tuning = with_seats(program, tuning)
    numbers = {
        "WorldSize": world_size,
        "Blocks": tuning.blocks,
        "Columns": columns,
        "MostColumns": max(tuning.columns, tuning.seats),
        "MostSeats": tuning.seats,
        "SeatStageSteps": with_seats(program, tuning).stage_steps,
        "Warps": tuning.warps,
        "Others": tuning.others,
        "MostStages": tuning.stages,
        "SharedBytes": tuning.shared_bytes,
        "StageSteps": tuning.stage_steps,
        "StepUnit": step_unit(program),
        "InFlight": tuning.in_flight,
        "UrgentInFlight": tuning.urgent_in_flight or tuning.in_flight,
        "KvStrands": tuning.kv_strands,
        "KvSplits": tuning.kv_splits,
        "StaggerNs": tuning.stagger_ns,
        "Staggers": tuning.staggers,
        "DelayNs": tuning.delay_ns,
        "Ablated": tuning.ablated,
        "Chunk": tuning.chunk,
        "ChunkWarps": tuning.chunk_warps,
        "ChunkOthers": tuning.chunk_others,
        "ChunkStages": tuning.chunk_stages,
        "ChunkSteps": tuning.chunk_steps,
        "ChunkShares": tuning.chunk_shares,
        "Squads": 1,
        "ChunkRows": 1,
        "ChunkEach": 16,
        "MessageModules": message_modules(program, 1),
        "MessageAreas": max(n * message_modules(program, n) for n in (1, tuning.squads)),
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
        # How many feed-forward blocks a position passes in each layer, and of how many.
        "Places": 1 if c.experts is None else c.experts.chosen,
        "Experts": 0 if c.experts is None else c.experts.num,
        "Parked": tuning.parked,
        "Vocab": c.vocab_size,
        "Context": context,
    }
    is_normalised = c.experts is not None and c.experts.is_normalised
    flags = {"HasQkNorm": c.has_qk_norm, "RoundsMessages": c.message_dtype == "bfloat16"}
    flags["HasBlocking"] = any(op.is_blocking for op in program.ops)
    flags["HasDelayed"] = any(op.receives is not None for op in program.ops)
    flags |= {"Samples": samples, "Traces": traces}
    # Several columns' partial results are too many for each block that needs the merged ones.
    flags |= {"Overlaps": overlaps, "MergesFirst": tuning.merges_first or columns > 1}
    flags |= {"MergesAlways": tuning.merges_first, "HasSeats": has_seats}
    flags["WeightsInRegisters"] = tuning.weights_in_registers
    flags["HasSinks"] = c.has_sinks
    flags |= {"HasExperts": c.experts is not None, "NormalisesShares": is_normalised}
    floats = {"NormEps": c.norm_eps, "AttentionScale": c.attention_scale}
    floats["SwigluLimit"] = c.swiglu_limit
    members = [
        _members(numbers),
        f"static constexpr int kSlowRank = {tuning.slow_rank};",
        *(f"static constexpr bool k{name} = {str(on).lower()};" for name, on in flags.items()),
        *(f"static constexpr float k{name} = {float(x):.9e}f;" for name, x in floats.items()),
    ]
    has_prefill = tuning.chunk > 1 and not samples and overlaps and columns == 1
    prefill = _PREFILL if has_prefill else ""
    if has_prefill and tuning.squads > 1:
        prefill += _SQUADS.format(members=_members(_of_squads(program, tuning)))
    trace = _TRACE if traces else ""
    return f"""
{cases_of(program)}

#include "decode.cuh"
#include "pack.cuh"
#include "prefill.cuh"
#include "trace_layout.cuh"
{formats_of(program)}
{sequence_of(program, tuning)}
struct Model : Ops {{
    {(chr(10) + "    ").join(members)}
}};

KCCL_KERNEL_OF(kccl::decode::kDecodeThreads<Model>)
void decode(KCCL_KERNEL_PARAM(kccl::DeviceComm) comm, KCCL_KERNEL_PARAM(kccl::decode::Task) task) {{
    using namespace kccl::platform;
    kccl::decode::run<Model>(first_parameter(comm), second_parameter(comm, task));
}}
{prefill}
KCCL_KERNEL void pack(uint8_t* weights, const uint8_t* matrix, uint64_t product, uint64_t layer,
                      uint64_t lane_group) {{
    kccl::decode::pack<Model>(weights, matrix, product, layer, lane_group);
}}

KCCL_KERNEL void copy_cache(uint8_t* to, const uint8_t* from, uint64_t num) {{
    kccl::decode::copy_cache<Model>(to, from, num);
}}

KCCL_KERNEL void describe(KcclDecodeSizes* out) {{ kccl::decode::describe<Model>(out); }}

KCCL_KERNEL void locate(uint64_t* out) {{ kccl::decode::locate<Model>(out); }}
{trace}"""
