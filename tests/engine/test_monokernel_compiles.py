"""The whole monokernel for real shapes, as NVIDIA's compiler sees it. No GPU is needed."""

import re
import struct
from dataclasses import replace

import pytest
from device_compilers import compile_cuda, find_nvrtc, ptx_entries
from long import long_after
from shapes import OF_MONOKERNEL

from kccl.engine.files.random_weights import MODELS
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.model.ops import KINDS
from kccl.engine.model.program import Program
from kccl.engine.model.variant import TRACING, parse
from kccl.engine.monokernel.machine import Machine
from kccl.engine.monokernel.other_tuning import with_variant
from kccl.engine.monokernel.source import kernels_of, source_of
from kccl.engine.monokernel.tuning import tuning_for

H200 = Machine(132)
# (model, GPUs, format, whether it samples) -> bytes of registers that may go through memory: in
# decode, and in prefill, which chooses no token, with chunks and with squads. In BF16 prefill of
# chunks spills once a step, in no loop of a product. In formats with scales such loops spill, too,
# and a prompt takes longer.
MOST_BYTES = {
    ("laneformer-2b", 1, "bfloat16", False): (112, 320, 900),
    ("llama-1b", 1, "bfloat16", True): (512,),
    ("laneformer-2b", 1, "e4m3_128", False): (112, 1408),
    # With zero points, and twelve warps.
    ("laneformer-2b", 1, "int4_zeros_128", False): (1024, 2048),
}
CONTEXT = 4096


@pytest.mark.long
@pytest.mark.parametrize(("model", "gpus", "dtype", "samples"), long_after(1, MOST_BYTES))
def test_it_compiles_for_hopper_and_keeps_its_registers(model, gpus, dtype, samples, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    limits = MOST_BYTES[model, gpus, dtype, samples]
    symbols = "6decode14", "7prefill14", "17prefill_in_squads14"
    kernels = dict(zip(symbols, limits, strict=False))
    program = Program(MODELS[model], dict.fromkeys(KINDS, MULTIPLIED[dtype]))
    tuning = tuning_for(program, gpus, H200)
    source = source_of(program, gpus, CONTEXT, tuning, samples=samples)
    names = ["decode", "prefill", "prefill_in_squads"][: len(limits)]
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


@pytest.mark.long
@pytest.mark.takes(30)
def test_decode_of_a_mixture_spills_nothing(headers):
    """Registers of polled packets, kept through all ops, were the cause (bench/LOG.md)."""
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    experts = (kind for kind in KINDS if KINDS[kind].has_experts)
    program = Program(MODELS["gpt-oss-20b"], dict.fromkeys(experts, MULTIPLIED["mxfp4"]))
    tuning = replace(tuning_for(program, 1, H200), chunk=1)
    source = source_of(program, 1, CONTEXT, tuning)
    _, log = compile_cuda(library, source, ["decode"], "sm_90a", headers)
    assert re.findall(r"for _Z6decode14\w+\nptxas[ .]*(\d+ bytes stack frame)", log) == [
        "0 bytes stack frame"
    ]


@pytest.mark.long
@pytest.mark.takes(30)
def test_five_columns_of_weights_with_minimums_compile(headers):
    """They are multiplied in two turns, the first with four columns."""
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    program = Program(MODELS["smollm2"], dict.fromkeys(KINDS, MULTIPLIED["nested4_32"]))
    tuning = replace(tuning_for(program, 1, H200), columns=5)
    source = source_of(program, 1, CONTEXT, tuning, columns=5)
    ptx, _ = compile_cuda(library, source, ["decode"], "sm_90a", headers)
    assert "mma.sync" in ptx


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        *((model, None) for model in (*OF_MONOKERNEL, "gpt-oss-120b", "qwen3-30b-a3b")),
        # Fewer blocks hold more sums each.
        *(("gpt-oss-120b", 64), ("gpt-oss-120b", 32)),
    ],
)
def test_a_tuning_fits_a_multiprocessor(model, blocks, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    program = Program(MODELS[model])
    # With more ranks a block has fewer rows.
    tuning = tuning_for(program, 1, H200, blocks)
    source, _, _ = source_of(program, 1, CONTEXT, tuning).partition("KCCL_KERNEL_OF(")
    facts = "sizeof(Shared<Model>), sizeof(PrefillShared<Model>)"
    if program.config.experts is not None:
        facts += ", sizeof(ExpertsArea<Model>), sizeof(VectorRing<Model>::stage)"
        facts += " + sizeof(BesideVectors<Model>::totals)"
    source += f"""
using namespace kccl::decode;
__device__ const unsigned long long kFacts[] = {{{facts}}};
"""
    ptx, _ = compile_cuda(library, source, ["kFacts"], "sm_90a", headers)
    (found,) = re.findall(r"kFacts\w*\[\d+\] = \{([^}]*)\}", ptx)
    # Bytes, without the zeros at the end.
    sizes = bytes(map(int, found.split(","))).ljust(32, b"\0")
    *both, of_experts, of_ring = struct.unpack("<4Q", sizes)
    assert of_experts <= of_ring and (of_experts > 0) == (program.config.experts is not None)
    for size in both:
        assert 0 < size <= H200.shared_bytes


@pytest.mark.long
@pytest.mark.parametrize("variant", [TRACING, parse("exchanges+weights+attention+pin:head")])
def test_variants_compile_for_hopper(variant, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    program = Program(MODELS["laneformer-2b"])
    tuning = with_variant(program, tuning_for(program, 1, H200), variant)
    source = source_of(program, 1, CONTEXT, tuning, traces=variant.traces)
    names = kernels_of(tuning, traces=variant.traces)
    ptx, _ = compile_cuda(library, source, names, "sm_90a", headers)
    (body,) = (body for name, body in ptx_entries(ptx).items() if "6decode14" in name)
    assert ("%clock64" in body) is variant.traces
