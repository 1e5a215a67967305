"""The whole monokernel for real shapes, as the GPUs' compilers see it. No GPU is needed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from device_compilers import (
    amd_functions,
    amd_metadata,
    compile_cuda,
    compile_hip,
    find_nvrtc,
    has_zig,
    ptx_entries,
)

import kccl
from kccl.engine.monokernel.shape import KERNELS, Tuning, kernels_of, source_of
from kccl.engine.monokernel.variant import TRACING, parse
from kccl.engine.program import Program
from kccl.engine.random_weights import MODELS

# model -> how one H200 decodes it, and bytes of registers that may go through memory: in the kernel
# that takes the most likely tokens, and in the one that samples.
SHAPES = {
    "laneformer-2b": (
        Tuning(
            blocks=128,
            warps=8,
            stages=8,
            stage_steps=6,
            in_flight=3,
            strands=64,
            splits=8,
            others=4,
            chunk_others=4,
        ),
        (64, 128),
    ),
    "llama-1b": (
        Tuning(
            blocks=132,
            warps=8,
            stages=5,
            stage_steps=8,
            in_flight=2,
            strands=64,
            splits=4,
            others=4,
            chunk_others=4,
        ),
        (192, 512),
    ),
}
CONTEXT = 4096
# Vector registers that AMD's kernels keep in memory: blocks of 768 and 1,024 threads have 168 and
# 128 each. By kernel, and whether it samples.
AMD_SPILLS = {("6decode14", False): 200, ("6decode14", True): 320, ("7prefill14", False): 115}
# Positions of a chunk, and bytes of registers that may go through memory.
CHUNK, PREFILL_BYTES = 64, 256


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """One folder with the library's headers and the kernels."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "kccl").symlink_to(Path(kccl.include_dir()) / "kccl")
    for path in KERNELS.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    return folder


@pytest.mark.parametrize(
    ("model", "dtype", "samples"),
    [
        *((model, "bfloat16", samples) for model in SHAPES for samples in (False, True)),
        ("laneformer-2b", "float16", False),
    ],
)
def test_it_compiles_for_hopper_and_keeps_its_registers(model, dtype, samples, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    tuning, most_bytes = SHAPES[model]
    kernels = {"6decode14": most_bytes[samples]}
    if not samples:
        kernels["7prefill14"] = PREFILL_BYTES
    tuning = replace(tuning, chunk=CHUNK)
    source = source_of(Program(MODELS[model]), 1, CONTEXT, tuning, dtype, samples=samples)
    names = ["decode"] if samples else ["decode", "prefill"]
    ptx, log = compile_cuda(library, source, names, "sm_90a", headers)
    entries = ptx_entries(ptx)
    for kernel, most in kernels.items():
        (body,) = (body for name, body in entries.items() if kernel in name)
        # Attention is F16.
        assert "mma.sync.aligned.m16n8k16.row.col.f32.f16" in body
        assert ("m16n8k16.row.col.f32.bf16" in body) is (dtype == "bfloat16")
        assert "cp.async.bulk" in body
        # Only sampling computes in double.
        assert (".f64" in body) is samples
        (numbers,) = re.findall(
            rf"Function properties for _Z{kernel}\w+\nptxas[ .]*\d+ bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads",
            log,
        )
        assert sum(map(int, numbers)) <= most


@pytest.mark.parametrize("variant", [TRACING, parse("exchanges+weights+attention+pin:head")])
def test_variants_compile_for_hopper(variant, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    tuning = variant.applied_to(SHAPES["laneformer-2b"][0])
    program = Program(MODELS["laneformer-2b"])
    source = source_of(program, 1, CONTEXT, tuning, traces=variant.traces)
    names = kernels_of(tuning, traces=variant.traces)
    ptx, _ = compile_cuda(library, source, names, "sm_90a", headers)
    (body,) = (body for name, body in ptx_entries(ptx).items() if "6decode14" in name)
    assert ("%clock64" in body) is variant.traces


@pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed")
@pytest.mark.parametrize(
    ("arch", "dtype", "ranks", "samples"),
    [
        ("gfx942", "bfloat16", 1, False),
        ("gfx942", "float16", 2, False),
        ("gfx950", "float16", 1, True),
    ],
)
def test_it_compiles_for_amd(arch, dtype, ranks, samples, headers, tmp_path):
    """A compute unit has 64 KB of shared memory, so the ring is small. With two ranks, the head has
    a part for each lane.
    """
    tuning = replace(SHAPES["laneformer-2b"][0], stages=2, stage_steps=3, strands=8)
    tuning = replace(tuning, chunk=8, chunk_stages=15, chunk_steps=4)
    config = MODELS["laneformer-2b"]
    if ranks > 1:
        config = replace(config, lm_head="vocab_parallel")
    source = source_of(Program(config), ranks, CONTEXT, tuning, dtype, samples=samples)
    assembly = compile_hip(source, arch, tmp_path, headers)
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
        assert numbers["vgpr_spill_count"] <= AMD_SPILLS[kernel, samples]
    (decode,) = (body for name, body in amd_functions(assembly).items() if "6decode14" in name)
    # Weights stream past the caches.
    assert re.search(r"global_load_dwordx4 .*\bnt$", decode, re.MULTILINE)
