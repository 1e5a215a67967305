"""Each element type compiles for GPUs with each of its operators."""

import pytest
from compiled_kernels import INCLUDE, needs_nvrtc, needs_zig
from device_compilers import amd_functions, compile_cuda, compile_hip, find_nvrtc, ptx_entries

from kccl.base import dtypes
from kccl.jit import cache, names
from kccl.plan.ops import ops_of

pytestmark = pytest.mark.long

# The longest element fills two packets, or a line of 16 bytes.
LONGEST = [
    names.expression(kernel, "complex128", "prod", cache.CSRC, 2)
    for kernel in ("all_reduce_one_shot_ll16", "all_reduce_two_shot_push_simple")
]
SOURCE = """
#include <kccl/kernels/all_reduce_one_shot_ll16.cuh>
#include <kccl/kernels/all_reduce_two_shot_push_simple.cuh>

template <class T, class Op>
KCCL_KERNEL void reduce_a_unit(uint64_t* out, const uint64_t* in) {
    constexpr uint32_t kUnit = kccl::kUnitPayloads<T>;
    uint64_t unit[kUnit];
    kccl::reduce_unit<T, Op, 2>(unit, in, kUnit, 2);
    for (uint32_t n = 0; n < kUnit; ++n) out[n] = unit[n];
}
"""
UNITS = [
    f"reduce_a_unit<{dtype.cpp_name}, {names.cpp_op(op)}>"
    for dtype in dtypes.ALL
    for op in ops_of(dtype)
]


def products(bodies):
    """The code of products of complex numbers, in which no compiler may fuse what is rounded."""
    found = [
        body
        for symbol, body in bodies.items()
        if "reduce_a_unit" in symbol and "Complex" in symbol and "Prod" in symbol
    ]
    assert len(found) == 2
    return "\n".join(found)


@needs_nvrtc
def test_for_nvidia():
    ptx, _ = compile_cuda(find_nvrtc(), SOURCE, [*UNITS, *LONGEST], "sm_90a", INCLUDE)
    entries = ptx_entries(ptx)
    assert len(entries) == len(UNITS) + len(LONGEST)
    code = products(entries)
    assert "mul.rn.f64" in code and "fma" not in code


@needs_zig
def test_for_amd(tmp_path):
    made = [f"template KCCL_KERNEL void {each}(uint64_t*, const uint64_t*);\n" for each in UNITS]
    made += [f"template KCCL_KERNEL void {each}(const KcclCall);\n" for each in LONGEST]
    functions = amd_functions(compile_hip(SOURCE + "".join(made), "gfx942", tmp_path, INCLUDE))
    assert sum("reduce_a_unit" in symbol for symbol in functions) >= len(UNITS)
    code = products(functions)
    assert "v_mul_f64" in code and "v_fma" not in code
