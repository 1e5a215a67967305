"""The whole monokernel for real shapes, as NVIDIA's compiler sees it. No GPU is needed."""

import re
from dataclasses import replace

import pytest
from device_compilers import compile_cuda, find_nvrtc, ptx_entries

from kccl.engine.monokernel.shape import Tuning, kernels_of, source_of
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
# Positions of a chunk, and bytes of registers that may go through memory.
CHUNK, PREFILL_BYTES = 64, 256


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
