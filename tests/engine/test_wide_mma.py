"""The products of four warps together (wide_mma.cuh): the same bits as one warp's."""

import numpy as np
import pytest
from device_compilers import compile_cuda, find_nvrtc
from numpy.typing import NDArray

import kccl
from kccl.engine.monokernel.launching import KERNELS

SOURCE = """
#include "wide_mma.cuh"

using namespace kccl::decode;
using kccl::bf16;
using kccl::f16;

constexpr uint32_t kVectors = VECTORS, kSteps = 4, kRows = 4 * kTileRows;
using Narrow = Mma<TYPE>;
using Wide = WideMma<TYPE, kVectors>;
static_assert(Wide::kIsThere);
static_assert(Wide::kStepBytes == kVectors * kTileFloat4s * sizeof(StagedFloat4));

// Shared memory: two steps in the wide form, and one in that of Mma.
struct Area {
    uint32_t wide[2][Wide::kStepBytes / sizeof(uint32_t)];
    StagedFloat4 narrow[kVectors * kTileFloat4s];
};

// Splits a step of the vectors, [vector][column], and stores it in both forms.
KCCL_DECODE void stage(Area* area, const Float4* vectors, uint32_t step) {
    const uint32_t thread = kccl::block().index(), threads = kccl::block().size();
    for (uint32_t i = thread; i < kVectors * kTileFloat4s; i += threads) {
        const uint32_t vector = i / kTileFloat4s, index4 = i % kTileFloat4s;
        const uint32_t at = (vector * kSteps + step) * kTileFloat4s + index4;
        const StagedFloat4 staged = split<TYPE>(kccl::mem::load_plain(vectors + at));
        store_wide(area->wide[step % 2], vector, index4, staged);
        kccl::mem::store_plain(area->narrow + i, staged);
    }
    kccl::mem::fence_copies();
    kccl::block().sync();
}

// tiles: [warp][step]. The sums are [vector][row]. Those of the wide unit go on for two steps, and
// begin at zero again.
KCCL_KERNEL void multiply(const uint8_t* tiles, const Float4* vectors, float* wide, float* narrow) {
    auto* const area = reinterpret_cast<Area*>(kccl::platform::dynamic_shared());
    const uint32_t warp_index = kccl::block().index() / kccl::platform::kWarpSize;
    const Narrow::Lane lane(Narrow::kVectors, kTileFloat4s);
    const auto tell = [&](float* to, uint32_t group, const Narrow::Sums& sums) {
        lane.totals(sums, [&](uint32_t row, uint32_t vector, float sum) {
            if (row >= kTileRows) return;
            vector += group * kWideVectors;
            float* const mine = to + vector * kRows + warp_index * kTileRows + row;
            kccl::mem::store_plain(mine, kccl::mem::load_plain(mine) + sum);
        });
    };
    Narrow::Sums each[kVectors / kWideVectors] = {};
    Wide unit;
    Wide::Sums sums = {};
    Narrow::Weights weights[2] = {};
    for (uint32_t step = 0; step < kSteps; ++step) {
        stage(area, vectors, step);
        const uint8_t* const tile = tiles + (warp_index * kSteps + step) * kTileBytes;
        weights[step % 2] = lane.weights(tile);
        unit.begin();
        unit.multiply(sums, weights[step % 2],
                      reinterpret_cast<const uint8_t*>(area->wide[step % 2]), step % 2 != 0);
        unit.commit();
        for (uint32_t group = 0; group < kVectors / kWideVectors; ++group) {
            Narrow::multiply(each[group], lane.weights(tile),
                             lane.inputs(area->narrow + group * kWideVectors * kTileFloat4s));
        }
        if (step % 2 == 0) {
            PENDING
        } else {
            SUMS
            for (uint32_t group = 0; group < kVectors / kWideVectors; ++group) {
                tell(wide, group, sums.of[group]);
                tell(narrow, group, each[group]);
                each[group] = {};
            }
            unit.wait(sums);
        }
        kccl::block().sync();
    }
}
"""
WAITS = {"PENDING": "unit.wait<1>();", "SUMS": "unit.wait(sums);"}


def source_of(type_name: str, vectors: int, **changes: str) -> str:
    source = SOURCE
    words = {"TYPE": type_name, "VECTORS": str(vectors), **WAITS, **changes}
    for word, text in words.items():
        source = source.replace(word, text)
    return source


def tiles_and_vectors(dtype: str, vectors: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Weights and vectors of very different sizes, which partly cancel."""
    random = np.random.default_rng(vectors)
    scales = np.exp2(random.integers(-9, 9, (4, 4, 16, 16)))
    weights = (random.normal(size=scales.shape) * scales).astype(np.float32)
    if dtype == "bf16":
        words = (weights.view(np.uint32) >> 16).astype(np.uint16)
    else:
        words = weights.astype(np.float16).view(np.uint16)
    given = random.normal(size=(vectors, 64)).astype(np.float32)
    given *= np.exp2(random.integers(-9, 9, given.shape)).astype(np.float32)
    return words, given


def multiply(
    type_name: str, warp_size: int, vectors: int = 32, **changes: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The sums of the wide unit, and those of one warp's."""
    words, given = tiles_and_vectors(type_name, vectors)

    def main(comm: kccl.Communicator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        tiles, staged = comm.empty(words.shape, "uint16"), comm.empty(given.shape, "float32")
        tiles[...], staged[...] = words, given
        wide, narrow = (comm.empty((vectors, 64), "float32") for _ in range(2))
        wide[...], narrow[...] = 0, 0
        module = kccl.compile(
            source_of(type_name, vectors, **changes),
            ["multiply"],
            target="sim",
            warp_size=warp_size,
            include_dirs=[KERNELS],
        )
        module.kernel("multiply")(
            *(comm, *(each.ctypes.data for each in (tiles, staged, wide, narrow))),
            **{"grid": 1, "block": 4 * warp_size, "shared_bytes": 3 * 64 * vectors},
        )
        return wide.copy(), narrow.copy()

    (result,) = kccl.run_threads(main, 1, backend="sim", warp_size=warp_size)
    return result


@pytest.mark.parametrize(
    ("type_name", "warp_size"), [("bf16", 32), ("f16", 64), ("WideF16", 32), ("bf16", 64)]
)
def test_the_sums_are_those_of_one_warp(type_name, warp_size):
    wide, narrow = multiply(type_name, warp_size)
    assert np.isfinite(narrow).all() and (narrow != 0).all()
    np.testing.assert_array_equal(wide.view(np.uint32), narrow.view(np.uint32))


@pytest.mark.parametrize(
    "changes",
    [
        {"SUMS": ""},
        # The group that computes the last step may still run.
        {"SUMS": "unit.wait<1>();"},
        # The last step is in no group.
        {"unit.commit();": "if (step % 2 == 0) unit.commit();"},
        # The next step overwrites the one that is multiplied.
        {"step % 2]": "0]"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_wait_that_is_missing_is_seen(changes):
    wide, narrow = multiply("bf16", 32, **changes)
    assert (wide != narrow).any()


@pytest.mark.parametrize(("vectors", "type_name"), [(32, "f16"), (64, "WideF16"), (128, "bf16")])
def test_it_is_one_instruction_on_hopper(vectors, type_name, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    source = source_of(type_name, vectors)
    ptx, _ = compile_cuda(library, source, ["multiply"], "sm_90a", headers)
    kind = "bf16" if type_name == "bf16" else "f16"
    assert f"wgmma.mma_async.sync.aligned.m64n{2 * vectors}k16.f32.{kind}.{kind} " in ptx
    assert "wgmma.fence" in ptx and "wgmma.wait_group" in ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_other_gpus_do_not_have_it(arch, headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    source = """
    #include "wide_mma.cuh"
    static_assert(!kccl::decode::WideMma<kccl::bf16, 64>::kIsThere);
    KCCL_KERNEL void nothing() {}
    """
    compile_cuda(library, source, ["nothing"], arch, headers)
