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
from kccl.engine.monokernel.shape import KERNELS, Tuning, source_of
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
AMD_SPILLS = {("6decode14", False): 180, ("6decode14", True): 320, ("7prefill14", False): 110}
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


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("model", SHAPES)
def test_it_compiles_for_hopper_and_keeps_its_registers(model, samples, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    tuning, most_bytes = SHAPES[model]
    kernels = {"6decode14": most_bytes[samples]}
    if not samples:
        kernels["7prefill14"] = PREFILL_BYTES
    tuning = replace(tuning, chunk=CHUNK)
    source = source_of(Program(MODELS[model]), 1, CONTEXT, tuning, samples=samples)
    names = ["decode"] if samples else ["decode", "prefill"]
    ptx, log = compile_cuda(library, source, names, "sm_90a", headers)
    entries = ptx_entries(ptx)
    for kernel, most in kernels.items():
        (body,) = (body for name, body in entries.items() if kernel in name)
        assert "mma.sync.aligned.m16n8k16" in body
        assert "cp.async.bulk" in body
        # Only sampling computes in double.
        assert (".f64" in body) is samples
        (numbers,) = re.findall(
            rf"Function properties for _Z{kernel}\w+\nptxas[ .]*\d+ bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads",
            log,
        )
        assert sum(map(int, numbers)) <= most


@pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed")
@pytest.mark.parametrize(("arch", "samples"), [("gfx942", False), ("gfx950", True)])
def test_it_compiles_for_amd(arch, samples, headers, tmp_path):
    """A compute unit has 64 KB of shared memory, so the ring is small."""
    tuning = replace(SHAPES["laneformer-2b"][0], stages=2, stage_steps=3, strands=8)
    tuning = replace(tuning, chunk=8, chunk_stages=15, chunk_steps=4)
    program = Program(MODELS["laneformer-2b"])
    source = source_of(program, 1, CONTEXT, tuning, samples=samples)
    assembly = compile_hip(source, arch, tmp_path, headers)
    for kernel in ("6decode14",) if samples else ("6decode14", "7prefill14"):
        (body,) = (body for name, body in amd_functions(assembly).items() if kernel in name)
        assert "v_mfma_f32_16x16x16_bf16" in body
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
