"""A rank's weights: layout.py and kernels/shape.cuh agree on each product and its bytes."""

from dataclasses import replace

import numpy as np
import pytest
from long import long_after

import kccl
from kccl.engine.files.random_weights import MODELS
from kccl.engine.formats.table import DTYPES, MULTIPLIED
from kccl.engine.model.config import ModelConfig
from kccl.engine.model.ops import PRODUCTS
from kccl.engine.model.program import Program
from kccl.engine.monokernel import layout
from kccl.engine.monokernel.chunks import chunk_parts
from kccl.engine.monokernel.launching import KERNELS
from kccl.engine.monokernel.machine import Kind
from kccl.engine.monokernel.sequence import name_of
from kccl.engine.monokernel.shape import Tuning
from kccl.engine.monokernel.source import source_of

SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 192, "context": 64, "num_layers": 2}
LANEFORMER = {
    "num_lanes": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn": 128,
    "window_layers": 2,
} | SMALL
LLAMA = {"num_lanes": 3, "num_heads": 6, "num_kv_heads": 3, "ffn": 192} | SMALL
PARTS = LANEFORMER | {"lm_head": "vocab_parallel", "vocab_size": 256}
USUAL = Tuning(blocks=4, warps=2, stages=4, stage_steps=2, in_flight=2, kv_strands=2, kv_splits=1)
CHUNKED = replace(USUAL, chunk=8, chunk_warps=4)
BYTES = {"num_lanes": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 256, "num_layers": 2}
BYTES |= {"hidden": 128, "head_dim": 32, "vocab_size": 192, "context": 64}
FP8 = dict.fromkeys(("qkv", "gate_up", "down"), MULTIPLIED["e4m3_128"])
FP8 |= {"out": MULTIPLIED["e4m3_32"]}
INT4 = {"qkv": "int4_128", "out": "int4_zeros_64", "gate_up": "q4_0", "down": "int4_128"}
INT4 = {kind: MULTIPLIED[name] for kind, name in INT4.items()}
LONG = replace(CHUNKED, warps=3, stage_steps=16, strip_tiles=8)
NESTED = {"qkv": "nested6_32", "out": "nested4_64", "gate_up": "nested4_32", "down": "nested6_256"}
NESTED = {kind: MULTIPLIED[name] for kind, name in NESTED.items()}
MIXED = {"down": DTYPES["float16"], "head": DTYPES["float16"]}
# (model, changes, formats, tuning, ranks)
CASES = {
    "laneformer": ("tiny-laneformer", LANEFORMER, {}, CHUNKED, (1, 2, 4)),
    "head parts": ("tiny-laneformer", PARTS, {}, replace(USUAL, blocks=8, warps=1), (1, 2)),
    "uneven lanes": ("tiny-llama", LLAMA, {}, replace(CHUNKED, blocks=5, stage_steps=1), (1, 2, 3)),
    # Lanes of 128 columns: strips of 4 tiles, and of 2 in the output projection.
    "8 bits": ("tiny-llama", BYTES, FP8, replace(CHUNKED, stage_steps=4, strip_tiles=4), (1, 2)),
    # Three warps: strips of 8 tiles, some of zeros, in the MLP's output, and of 2 tiles with zero
    # points in that of attention.
    "4 bits": ("tiny-llama", BYTES | {"ffn": 1280}, INT4, LONG, (1, 2)),
    # Strips of 2, 1, 2 and 8 tiles; and stages of 16 tiles of 4 bits, and 8 of 6.
    "scales of two levels": ("tiny-llama", BYTES | {"ffn": 1536}, NESTED, LONG, (1, 2)),
    "two formats": ("tiny-llama", LLAMA, MIXED, replace(USUAL, warps=3, stage_steps=1), (1,)),
}


def check_of(program: Program, rank: int, world_size: int, tuning: Tuning) -> str:
    """Assertions that hold when the kernels are compiled."""
    lanes = program.lanes_of(rank, world_size)
    groups = layout.groups_of(program, lanes)
    pieces = list(layout.pieces(program, rank, world_size))
    lines = [f"static_assert(Dims::kLaneGroups == {len(groups)}, {quoted('groups')});"]
    for each in (*layout.products_of(program, len(groups[0])), pieces[-1].product):
        product = f"Dims::{name_of(each.kind)}"
        steps = each.steps(tuning.warps, tuning.strip_tiles)
        facts = {
            f"{product}::kTiles * kTileRows": each.rows,
            f"{product}::kColumns": each.columns,
            f"{product}::kLanes": each.lanes,
            f"{product}::kSteps": steps,
            f"{product}::Format::kTileBytes": each.format.tile_bytes,
            f"{product}::Format::kStripTiles": each.strip_tiles(tuning.warps, tuning.strip_tiles),
            f"{product}::kTiles * {product}::kPacked * kTileBytesOf<{product}::Format>": (
                each.packed_bytes(tuning.warps, tuning.strip_tiles)
            ),
        }
        if tuning.chunk > 1 and each.kind != "head":
            tiles = -(-each.rows // layout.TILE // (tuning.blocks // len(groups)))
            positions = tuning.chunk // Kind().vectors
            parts = chunk_parts(tiles, positions, tuning.chunk_warps)
            facts[f"ChunkPlan<Model, {product}>::kParts"] = parts
        lines += [f"static_assert({a} == {b}u, {quoted(a)});" for a, b in facts.items()]
    packed = layout.packed_bytes(program, rank, world_size, tuning.warps, tuning.strip_tiles)
    whole = "Dims::stream_of(Model::kBlocks) * kUnitBytes<Model>"
    lines.append(f"static_assert({whole} == {packed}u, {quoted('the stream')});")
    numbers = tuning.warps, tuning.stage_steps, tuning.strip_tiles
    stage = layout.stage_bytes(program, *numbers)
    lines.append(f"static_assert(Dims::kStageBytes == {stage}u, {quoted('a stage')});")
    # Each block's stream ends where the next one begins, and has its products in their order.
    lines.append(ORDER)
    of_layer = [each.number for each in pieces if (each.layer, each.group) == (0, 0)]
    assert of_layer == list(range(len(PRODUCTS) - 1)) and pieces[-1].number == len(PRODUCTS) - 1
    return "\n".join(lines)


def quoted(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'


ORDER = """
constexpr bool is_in_order() {
    for (uint32_t block = 0; block < Model::kBlocks; ++block) {
        const uint32_t member = Dims::block_in_group_of(block);
        const uint64_t layers = Dims::packed_by(member) * Model::kNumLayers;
        const uint64_t head =
            uint64_t{Dims::head_tiles_of(block).num} * Dims::Head::kPackedUnits;
        if (Dims::stream_of(block) + layers + head != Dims::stream_of(block + 1)) return false;
        constexpr uint32_t kNum = Model::kNumProducts;
        if (Products<Model>::packed_of(member, kNum) != Dims::packed_by(member)) return false;
        for (uint32_t i = 0; i < kNum; ++i) {
            const uint64_t from = Products<Model>::packed_of(member, i);
            if (from > Products<Model>::packed_of(member, i + 1)) return false;
        }
    }
    return true;
}
static_assert(is_in_order(), "a block's stream");
"""


def compiled(program: Program, rank: int, world_size: int, tuning: Tuning, checks: str) -> None:
    source = source_of(program, world_size, 64, tuning, rank=rank)
    head, _, _ = source.partition("KCCL_KERNEL_OF(")
    head += f"""
namespace kccl::decode {{
using Dims = Shape<Model>;
{checks}
}}  // namespace kccl::decode
KCCL_KERNEL void nothing(uint32_t* out) {{ *out = 1; }}
"""
    kccl.compile(head, ["nothing"], target="sim", include_dirs=[KERNELS])


@pytest.mark.long
@pytest.mark.parametrize("name", long_after(2, CASES))
def test_the_kernels_have_the_layout_that_python_has(name):
    model, changes, formats, tuning, ranks = CASES[name]
    config: ModelConfig = replace(MODELS[model], **changes)
    program = Program(config, formats)
    for world_size in ranks:
        for rank in range(world_size) if config.num_lanes % world_size else (0,):
            checks = check_of(program, rank, world_size, tuning)
            compiled(program, rank, world_size, tuning, checks)


def test_a_layout_that_differs_is_found():
    program = Program(replace(MODELS["tiny-llama"], **LLAMA))
    checks = check_of(program, 0, 1, USUAL)
    other = check_of(Program(replace(MODELS["tiny-llama"], **LLAMA | {"ffn": 96})), 0, 1, USUAL)
    assert checks != other
    with pytest.raises(kccl.CompileError, match="GateUp::kTiles"):
        compiled(program, 0, 1, USUAL, other)


def test_the_sum_of_all_ranks_is_the_model():
    for model, changes, formats, _, ranks in CASES.values():
        program = Program(replace(MODELS[model], **changes), formats)
        sizes = {
            sum(layout.total_bytes(program, rank, each) for rank in range(each)) for each in ranks
        }
        c, shapes = program.config, program.config.layer_shapes()
        of_layer = sum(
            program.format_of(op.kind).bytes_of(int(np.prod(shapes[name.rpartition(".")[2]])))
            for op in program.ops
            if op.name.startswith("layers.0.")
            for name in op.weights
            if len(shapes[name.rpartition(".")[2]]) == 3
        )
        head = program.format_of("head").bytes_of(c.vocab_size * c.hidden)
        assert sizes == {c.num_layers * of_layer + head}
        for each in ranks:
            rows = layout.head_rows(program, each)
            assert rows == -(-c.num_lanes // each) * c.vocab_size // c.num_lanes or (
                program.num_head_parts == 1 and rows == c.vocab_size // each
            )
