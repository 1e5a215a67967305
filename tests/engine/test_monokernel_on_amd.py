"""The whole monokernel as clang compiles it for AMD's GPUs, with the tunings that they get. No GPU
is needed.
"""

import re
from dataclasses import replace

import pytest
from device_compilers import amd_functions, amd_metadata, compile_hip, has_zig
from shapes import OF_MONOKERNEL

from kccl.engine.files.random_weights import MODELS
from kccl.engine.formats.table import DTYPES, MULTIPLIED
from kccl.engine.model.ops import KINDS
from kccl.engine.model.program import Program
from kccl.engine.monokernel.machine import AMD, Machine
from kccl.engine.monokernel.source import source_of
from kccl.engine.monokernel.tuning import tuning_for

MI300X = Machine(304, 64 << 10, AMD)
MI355X = Machine(256, 160 << 10, AMD)
CONTEXT = 4096
# Vector registers that a kernel keeps in memory, and a thread's bytes there: by model, and whether
# it samples. A copy of the task would add 340 bytes.
DECODE_SPILLS = {
    ("laneformer-2b", False): (12, 208),
    ("llama-1b", False): (146, 592),
    ("llama-1b", True): (142, 672),
    ("gpt-oss-20b", False): (96, 512),
    ("qwen3-30b-a3b", False): (64, 384),
}
# Whole models on one MI300X, with gpt-oss's experts as they are stored.
MIXTURES = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b")
# The vectors of a layer's widest products are in block-shared memory, 4 bytes for each value. On
# one MI300X there is no room for a wider residual and feed-forward block together.
WIDEST = 3072 + 12288
FACTS = ("sizeof(Shared<Model>)", "sizeof(PrefillShared<Model>)")

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(30),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]


def program_of(model):
    stored_in = MULTIPLIED["mxfp4"] if model.startswith("gpt-oss") else DTYPES["bfloat16"]
    has_experts = (kind for kind in KINDS if KINDS[kind].has_experts)
    return Program(MODELS[model], dict.fromkeys(has_experts, stored_in))


PROGRAMS = {model: program_of(model) for model in (*OF_MONOKERNEL, *MIXTURES)}


def least_ranks(program, machine):
    """So few have room for the model. With more ranks a block has fewer rows."""
    if program.config.experts is not None:
        return 1
    width = program.config.hidden + program.config.ffn
    return 2 if machine is MI300X and width > WIDEST else 1


@pytest.mark.parametrize("machine", [MI300X, MI355X], ids=["MI300X", "MI355X"])
@pytest.mark.parametrize("model", PROGRAMS)
def test_all_blocks_and_their_waves_have_room(model, machine):
    program = PROGRAMS[model]
    for ranks in range(least_ranks(program, machine), min(8, program.config.num_lanes) + 1):
        if program.config.num_lanes % ranks:
            continue
        tuning = tuning_for(program, ranks, machine)
        assert ranks * tuning.blocks <= 32 * 32 and tuning.blocks <= machine.multiprocessors
        # A thread has 256 registers: at most two waves are on each of four SIMDs.
        assert max(tuning.warps + tuning.others, tuning.chunk_warps + tuning.chunk_others) <= 8


@pytest.mark.parametrize("machine", [MI300X, MI355X], ids=["MI300X", "MI355X"])
@pytest.mark.parametrize("model", PROGRAMS)
def test_a_tuning_fits_a_compute_unit(model, machine, headers, tmp_path):
    program = PROGRAMS[model]
    ranks = least_ranks(program, machine)
    tuning = tuning_for(program, ranks, machine)
    source, _, _ = source_of(program, ranks, CONTEXT, tuning).partition("KCCL_KERNEL_OF(")
    facts = ", ".join(FACTS)
    source += f"""
using namespace kccl::decode;
extern "C" __attribute__((device, used)) const unsigned long long kFacts[] = {{{facts}}};
"""
    assembly = compile_hip(source, "gfx942", tmp_path, headers)
    found = re.search(r"^kFacts:\n((?:\s+\.quad\s+\d+.*\n)+)", assembly, re.MULTILINE)
    assert max(map(int, re.findall(r"\.quad\s+(\d+)", found[1]))) <= machine.shared_bytes


@pytest.mark.takes(60)
@pytest.mark.parametrize("model", [each for each in MIXTURES if (each, False) in DECODE_SPILLS])
def test_mixtures_compile(model, headers, tmp_path):
    tuning = tuning_for(PROGRAMS[model], 1, MI300X)
    assert tuning.weights_in_registers and tuning.chunk > 1 and tuning.parked == 0
    source = source_of(PROGRAMS[model], 1, CONTEXT, tuning)
    assembly = compile_hip(source, "gfx942", tmp_path, headers)
    for kernel, most in (("6decode14", DECODE_SPILLS[model, False]), ("7prefill14", (32, 384))):
        (numbers,) = (n for name, n in amd_metadata(assembly).items() if kernel in name)
        assert numbers["vgpr_count"] * numbers["max_flat_workgroup_size"] // 256 <= 512
        assert numbers["vgpr_spill_count"] <= most[0]
        assert numbers["private_segment_fixed_size"] <= most[1]
        # No table of ops is left in memory.
        (body,) = (body for name, body in amd_functions(assembly).items() if kernel in name)
        assert "v_mfma_f32_16x16x16" in body and "kLayer" not in body


@pytest.mark.parametrize(
    ("model", "arch", "dtype", "ranks", "samples"),
    [
        ("laneformer-2b", "gfx942", "bfloat16", 1, False),
        ("laneformer-2b", "gfx942", "float16", 2, False),
        ("llama-1b", "gfx942", "bfloat16", 1, True),
        ("llama-1b", "gfx950", "float16", 1, False),
    ],
)
def test_it_compiles(model, arch, dtype, ranks, samples, headers, tmp_path):
    """With two ranks, the head has a part for each lane."""
    config = MODELS[model]
    if ranks > 1:
        config = replace(config, lm_head="vocab_parallel")
    program = Program(config, dict.fromkeys(KINDS, DTYPES[dtype]))
    tuning = tuning_for(program, ranks, MI300X if arch == "gfx942" else MI355X)
    source = source_of(program, ranks, CONTEXT, tuning, samples=samples)
    assembly = compile_hip(source, arch, tmp_path, headers)
    most = {"6decode14": DECODE_SPILLS[model, samples], "7prefill14": (0, 128)}
    for kernel in ("6decode14",) if samples else ("6decode14", "7prefill14"):
        (body,) = (body for name, body in amd_functions(assembly).items() if kernel in name)
        assert ("v_mfma_f32_16x16x16_bf16" in body) is (dtype == "bfloat16")
        assert "v_mfma_f32_16x16x16_f16" in body
        # Sums over lanes of a wave do not go through block-shared memory.
        assert "row_mirror" in body and "row_half_mirror" in body
        (numbers,) = (n for name, n in amd_metadata(assembly).items() if kernel in name)
        # All of a block's shared memory is dynamic.
        assert numbers["group_segment_fixed_size"] == 0
        assert numbers["vgpr_count"] * numbers["max_flat_workgroup_size"] // 256 <= 512
        assert numbers["vgpr_spill_count"] <= most[kernel][0]
        assert numbers["private_segment_fixed_size"] <= most[kernel][1]
    (decode,) = (body for name, body in amd_functions(assembly).items() if "6decode14" in name)
    check_weights(decode, tuning.stage_steps, dtype, stay_on_their_way=model == "laneformer-2b")


def check_weights(decode, steps, dtype, *, stay_on_their_way):
    """Weights stream past the caches into the very registers from which matrix units take them.

    So neither block-shared memory nor a copy stands between, for which a wave would wait.
    """
    load = r"^\tglobal_load_dwordx2 (v\[\d+:\d+\]), .*\bnt$"
    loaded = re.findall(load, decode, re.MULTILINE)
    registers = set(loaded)
    # The first stage, and one behind each stage: where weights are only read, of layers, of the
    # head.
    assert len(registers) == steps and len(loaded) == 4 * steps
    # Nothing else is non-temporal: no other warp copies weights.
    assert len(re.findall(r"\bnt$", decode, re.MULTILINE)) == len(loaded)
    unit = {"bfloat16": "v_mfma_f32_16x16x16_bf16", "float16": "v_mfma_f32_16x16x16_f16"}[dtype]
    taken = set(re.findall(rf"^\t{unit} \S+ (v\[\d+:\d+\]),", decode, re.MULTILINE))
    # Attention multiplies in F16, too.
    assert taken >= registers and (dtype == "float16" or taken == registers)
    stored = re.findall(r"^\tds_write_b(?:64|128) v\d+, (v\[\d+:\d+\])", decode, re.MULTILINE)
    assert not registers & set(stored)
    if not stay_on_their_way:
        return
    # When a product has been multiplied, nothing waits for the next weights before the rows are
    # published. A spilled register would.
    of_layers = re.split(load, decode, flags=re.MULTILINE)[2 * 3 * steps]
    *_, behind = of_layers.partition("\tglobal_store_dwordx2")[0].split(unit)
    assert behind.count("ds_read") > 1 and "vmcnt" not in behind
