"""CUDA's words in kernels on the simulator: each works, or the error says what to write instead."""

import ml_dtypes
import numpy as np
import pytest
from long import long_after

import kccl

SOURCE = """
#include <kccl/kccl.cuh>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cassert>
#include <algorithm>

__constant__ float table[3] = {1, 2, 3};
__device__ constexpr int kOffset = 2;

__device__ __forceinline__ float warp_sum(float value) {
    for (int offset = warpSize / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, offset);
    }
    return value;
}

__global__ void __launch_bounds__(64) words(float* out, const float4* in, int* count) {
    const dim3 me = threadIdx;
    const uint3 at = blockIdx;
    const unsigned int i = at.x * blockDim.x + me.x + threadIdx.y + threadIdx.z;
    const float4 four = __ldg(in + i % 2);
    const int lane = static_cast<int>(me.x) % warpSize;
    const float sum = warp_sum(four.x + four.y + four.z + four.w);
    const long long before = clock64();
    __nanosleep(20);
    const int old = atomicAdd(count, 1);
    assert(old >= 0);
    __threadfence();
    __syncwarp(0xffffffff);
    const bool same = __all_sync(0xffffffff, __shfl_sync(0xffffffff, lane, 3) == 3);
    const int down = __shfl_down_sync(0xffffffff, lane, 1, 8);
    const int up = __shfl_up_sync(0xffffffff, lane, 1, 8);
    const bool either = __syncthreads_or(i == 5);
    __syncthreads();
    if (i == 7) out[7] = static_cast<float>(down * 10 + up);
    if (i != 0) return;
    out[0] = sum;
    out[1] = table[kOffset] + min(2.0f, 1.0f) + max(1, 2);
    out[2] = clock64() > before && same && either;
    out[3] = __int_as_float(__float_as_int(rsqrtf(4.0f))) + __popc(7u) + make_float2(1, 2).y;
    printf("sum %.1f of block %u\\n", sum, at.x);
}

__global__ void floats(__nv_bfloat16* b, half2* h, float* out) {
    if (threadIdx.x != 0) return;
    b[0] = __float2bfloat16(1.5f) + b[1];
    b[2] = __float2bfloat16(1.00390625f);  // a tie, to even
    h[0] = __hfma2(__floats2half2_rn(1, 2), h[1], __float2half2_rn(0.5f));
    h[0].y += __float2half(1.0f);
    out[0] = __half2float(h[0].y) + __bfloat162float(b[0]);
    out[1] = __low2float(h[1]) < __high2float(h[1]) || b[1] > b[0];
    const float2 both = __half22float2(h[1]);
    out[2] = both.x + both.y;
    kccl::bf16 mine = kccl::platform::bit_cast<kccl::bf16>(b[0]);
    out[3] = kccl::Element<kccl::bf16>::widen(mine);
}

__global__ void wrong(int* x) {
    assert(x[0] == 5 && "five");
}
"""


def run(main, **options):
    return kccl.run_threads(main, 1, backend="sim", **options)[0]


@pytest.fixture(scope="module", params=(32, 64))
def module(request):
    return kccl.compile(SOURCE, ["words", "floats", "wrong"], warp_size=request.param)


def test_words_mean_what_they_mean_in_cuda(module, capfd):
    def main(comm):
        out, count = np.zeros(8, np.float32), np.zeros(1, np.int32)
        module.kernel("words")(comm, out, np.arange(8, dtype=np.float32), count, grid=2)
        return out.tolist(), count.tolist()

    out, count = run(main, warp_size=module.warp_size)
    assert out[:4] == [module.warp_size * 14, 6, 1, 5.5] and count == [128]
    assert out[7] == 7 * 10 + 6  # the last of eight lanes keeps its own
    assert capfd.readouterr().out == f"sum {module.warp_size * 14:.1f} of block 0\n"


def test_small_floats_are_those_of_numpy(module):
    def main(comm):
        b = np.array([0, 2.25, 0], ml_dtypes.bfloat16)
        h, out = np.array([0, 0, 3, 4], np.float16), np.zeros(4, np.float32)
        module.kernel("floats")(comm, b, h, out)
        return b.astype(float).tolist(), h.tolist(), out.tolist()

    b, h, out = run(main, warp_size=module.warp_size)
    assert b == [3.75, 2.25, 1.0]
    assert h == [3.5, 9.5, 3, 4]
    assert out == [9.5 + 3.75, 1, 7, 3.75]


def test_every_small_float_widens_and_rounds_as_in_numpy():
    source = """
#include <kccl/kccl.cuh>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <class T>
__global__ void widen(const T* in, float* out, T* back) {
    for (int i = threadIdx.x; i < 65536; i += blockDim.x) {
        out[i] = static_cast<float>(in[i]);
        back[i] = T(out[i] * 1.01f);
    }
}
"""
    types = {"widen<__half>": np.float16, "widen<__nv_bfloat16>": ml_dtypes.bfloat16}
    module = kccl.compile(source, list(types))

    def main(comm):
        for name, dtype in types.items():
            x = np.arange(65536, dtype=np.uint16).view(dtype)
            out, back = np.zeros(65536, np.float32), np.zeros(65536, dtype)
            module.kernel(name)(comm, x, out, back)
            with np.errstate(all="ignore"):
                wide = x.astype(np.float32)
                want = (wide * np.float32(1.01)).astype(dtype)
            np.testing.assert_array_equal(out, wide)
            np.testing.assert_array_equal(back.astype(np.float32), want.astype(np.float32))

    run(main)


def test_min_and_max_of_mixed_types_are_those_of_cuda():
    pairs = [
        ("int", "unsigned int", "unsigned int"),
        ("long", "unsigned long", "unsigned long"),
        ("long long", "unsigned long long", "unsigned long long"),
        ("float", "double", "double"),
    ]
    checks = "".join(
        f"static_assert(std::is_same_v<decltype({f}(({a})1, ({b})2)), {want}>);\n"
        f"static_assert(std::is_same_v<decltype({f}(({b})1, ({a})2)), {want}>);\n"
        for f in ("min", "max")
        for a, b, want in pairs
    )
    body = """if (threadIdx.x != 0) return;
n[0] = min(n[0], 3u);
n[1] = max(2u, n[1]);
x[0] = max(x[0], 2.0);"""
    module = kccl.compile(KERNEL.format(body=body) + checks, ["mine"])

    def main(comm):
        x, n = np.array([1], np.float32), np.array([-1, 1], np.int32)
        module.kernel("mine")(comm, x, n)
        return x.tolist(), n.tolist()

    assert run(main) == ([2.0], [3, 2])


def test_a_false_assertion_is_a_finding(module):
    def main(comm):
        module.kernel("wrong")(comm, np.zeros(1, np.int32))

    with pytest.raises(kccl.ProtocolError, match="assertion: rank 0 block 0 thread") as told:
        run(main, warp_size=module.warp_size)
    line = SOURCE[: SOURCE.index("assert(x[0]")].count("\n") + 1
    assert f'at source:{line}: assert(x[0] == 5 && "five") does not hold' in str(told.value)
    assert told.value.kind == "assertion"


KERNEL = "#include <kccl/kccl.cuh>\n__global__ void mine(float* x, int* n) {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    # Some that a reading of the text finds, and some of the compiler's.
    long_after(
        5,
        [
            (
                "__shared__ float tile[64]; tile[threadIdx.x] = 1; x[0] = tile[0];",
                r"source:3: __shared__: .* declared by KCCL_BLOCK_SHARED\(Tile, tile\)",
            ),
            (
                "extern __shared__ float tile[]; x[0] = tile[0];",
                r"source:3: extern __shared__: .*kccl::platform::dynamic_shared\(\)\)",
            ),
            ("atomicAdd(x, 1.0f);", "atomicAdd: here it adds int and unsigned int only"),
            ("atomicMax(n, 1);", "atomicMax: write atomicAdd"),
            ("other<<<1, 1>>>();", "source:3: <<<: a program in Python launches"),
            ('asm volatile("bar.sync 0;");', "source:3: asm volatile: a CPU runs no PTX"),
            ("atomicCAS(n, 0, 1);", r"atomicCAS: write kccl::mem::claim\(\)"),
            ("atomicAdd_system(n, 1);", "source:3: atomicAdd_system: write kccl::mem::add"),
            ("n[0] = __activemask();", "source:3: __activemask: write __ballot_sync"),
            ("x[0] = __shfl(x[0], 1);", "source:3: __shfl: write it with _sync"),
            (
                "cudaDeviceSynchronize();",
                "source:3: cudaDeviceSynchronize: a source for kccl.compile",
            ),
        ],
    ),
)
def test_what_is_not_there_has_a_sentence(body, message):
    with pytest.raises(kccl.CompileError, match=message) as told:
        kccl.compile(KERNEL.format(body=body), ["mine"])
    assert message.partition(": ")[0].removeprefix("source:3: ") in told.value.log
    assert told.value.log.count("KCCL_BLOCK_SHARED") <= 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#include <cooperative_groups.h>", r"cooperative_groups.h: here write kccl::block\(\)"),
        ("#include <cub/cub.cuh>", "source:1: #include <cub/cub.cuh>: .* none of CUDA's libraries"),
        ("#include <mma.h>", "source:1: #include <mma.h>: of CUDA's headers there are on a CPU"),
        (
            "__device__ int counter;",
            "source:1: __device__ int counter: each GPU has one of its own",
        ),
        ("static __device__ float a[4] = {0};", r"source:1: __device__ float a\[4\]: each GPU"),
        ("__managed__ int n;", "source:1: __managed__ int n: each GPU"),
        (
            "#ifndef GUARD\n#define GUARD\n#if 0\n#endif\n__device__ int n;\n#endif",
            "source:5: __device__ int n: each GPU",
        ),
        ("__constant__ float table[3];", r"source:1: __constant__ float table\[3\]: give it"),
    ],
)
def test_lines_that_a_cpu_cannot_have(line, message):
    with pytest.raises(kccl.CompileError, match=message):
        kccl.compile(f"{line}\n{KERNEL.format(body='')}", ["mine"])


NO_VARIABLES = [
    "// __device__ int counter;",
    "__device__ const int kTable[2] = {1, 2};",
    "__device__ bool operator==(dim3 a, dim3 b) { return a.x == b.x; }",
    "__device__ __forceinline__ float twice(float x);\nfloat twice(float x) { return 2 * x; }",
    "template <class T> __device__ T half_of(T x) { return x / 2; }",
    "#define DEV __device__ __forceinline__\nusing T = float;",
    "#define DEV __device__ \\\n    __forceinline__\nnamespace mine_too {\n}",
    "#define DEV __device__ __forceinline__\n#include <stdint.h>\nDEV int f() { return 1; }",
    "inline int g() { return [=] __device__ { return 1; }(); }",
    "inline int g() { return [=] __host__ __device__ mutable noexcept { return 1; }(); }",
    "#if 0\n#if 1\n__device__ int counter;\n#endif\n__managed__ int n;\n#endif",
    "#ifdef __CUDACC__\n__device__ int counter;\n#endif",
    "constexpr char kQuote = '\"';  // __device__ int counter;",
]


def test_what_is_no_variable_compiles():
    """Each in a namespace of its own, because one compilation takes as long as each would."""
    parts = [
        f"namespace part_{number} {{\n{line}\n}}\n#undef DEV\n"
        for number, line in enumerate(NO_VARIABLES)
    ]
    source = f"#include <stdint.h>\n{KERNEL.format(body='')}{''.join(parts)}"
    assert kccl.compile(source, ["mine"]).names == ("mine",)
