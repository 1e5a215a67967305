"""Formats with scales, as the monokernel packs and multiplies them: each number by itself."""

import numpy as np
import pytest
from long import long_after
from numpy.typing import NDArray

import kccl
from kccl.engine.formats.base import Format
from kccl.engine.formats.groups import Groups
from kccl.engine.formats.nested import Nested
from kccl.engine.formats.nvfp4 import Nvfp4
from kccl.engine.formats.table import MULTIPLIED
from kccl.engine.monokernel.launching import KERNELS
from kccl.engine.monokernel.sequence import type_of

ROWS, COLUMNS = 16, 256
# Each format, and the tiles of a strip: as many as a group has, or half of them.
FORMATS = {
    each.name: (each, min(8, each.block // (32 if each.has_zeros else 16)))
    for each in MULTIPLIED.values()
    if each.scale_bytes
}
# It compiles them all, which is long on a busy machine.
pytestmark = pytest.mark.takes(15)
SOURCE = """
#include "format.cuh"
INCLUDES

namespace kccl::decode {

// Packs 16 rows, and multiplies each column by itself.
template <class F>
KCCL_DECODE void multiply_columns(float* out, float* fours, uint8_t* packed, StagedFloat4* staged,
                                  const uint8_t* rows, uint32_t columns) {
    using Unit = Mma<typename F::Operand>;
    const typename Unit::Lane lane(1, kTileFloat4s);
    for (uint32_t tile = 0; tile < columns / kTileColumns; ++tile) {
        uint8_t* const strip = packed + tile / F::kStripTiles * kStripBytes<F>;
        F::pack(strip + tile % F::kStripTiles * F::kTileBytes, rows, 0, tile * kTileColumns,
                columns, kTileColumns);
        if (tile % F::kStripTiles != 0) continue;
        F::pack_scales(strip + F::kStripTiles * F::kTileBytes, rows, 0, tile * kTileColumns,
                       columns, kTileColumns);
    }
    warp().sync();
    for (uint32_t column = 0; column < columns; ++column) {
        const uint32_t tile = column / kTileColumns, within = column % kTileColumns;
        if (warp().index() < kTileFloat4s) {
            Float4 four = {};
            if (within / 4 == warp().index()) four.value[within % 4] = 1;
            staged[warp().index()] = split<typename F::Operand>(four);
        }
        warp().sync();
        const Strip<F> strip =
            load_strip<F>(lane, packed + tile / F::kStripTiles * kStripBytes<F>);
        typename Unit::Scaled scaled = {};
        // The strip's other tiles get zeros, which lie behind.
        multiply_strips<F>(scaled, &strip, [&](uint32_t i) {
            return lane.inputs(staged + (i == tile % F::kStripTiles ? 0 : kTileFloat4s));
        });
        lane.totals(scaled, [&](uint32_t row, uint32_t vector, float sum) {
            if (vector == 0 && row < kTileRows) out[row * columns + column] = sum;
        });
        warp().sync();
    }
    for (uint32_t i = warp().index(); i < kTileRows * columns / 4; i += warp().size()) {
        const Float4 four = F::four(rows, i);
        for (uint32_t k = 0; k < 4; ++k) fours[i * 4 + k] = four.value[k];
    }
}

}  // namespace kccl::decode

KCCL_KERNEL void multiply(float* out, float* fours, uint8_t* packed, uint8_t* staged,
                          const uint8_t* rows, uint64_t format) {
    using namespace kccl::decode;
    switch (format) { CASES }
}
"""


def source() -> str:
    includes = sorted({each.family or each.name for each, _ in FORMATS.values()})
    cases = (
        f"case {i}: multiply_columns<{type_of(each, strip)}>(out, fours, packed,"
        f" reinterpret_cast<StagedFloat4*>(staged), rows, {COLUMNS}); break;"
        for i, (each, strip) in enumerate(FORMATS.values())
    )
    lines = "\n".join(f'#include "formats/{name}.cuh"' for name in includes)
    return SOURCE.replace("INCLUDES", lines).replace("CASES", "\n        ".join(cases))


def stored_rows(each: Format) -> NDArray[np.uint8]:
    """Rows with all numbers that the format has: scales and zero points are any that are right."""
    random = np.random.default_rng(0)
    groups = random.integers(256, size=(ROWS * COLUMNS // each.block, each.words)).astype(np.uint8)
    if each.name == "mxfp4":
        # Powers of two, the smallest one and the largest one with which all numbers are finite.
        groups[:, 0] %= 241
        groups[:2, 0] = 0, 240
        return groups.reshape(ROWS, -1)
    if isinstance(each, Nested):
        halves = random.standard_normal(2 * len(groups)).astype(np.float16)
        groups[:, :4] = halves.view(np.uint8).reshape(len(groups), -1)
        last = 4 + each.block // (32 if each.family == "nested4" else 16)
        groups[:, last : last + each.block // 32] &= 127  # Minimums.
        return groups.reshape(ROWS, -1)
    if isinstance(each, Nvfp4):
        # A factor's product with a scale is exact, and so the order of products does not matter.
        factors = random.standard_normal(len(groups)).astype(np.float16).astype(np.float32)
        groups[:, :4] = factors.view(np.uint8).reshape(len(groups), -1)
        scales = groups[:, 4 : 4 + each.block // 16]
        scales[(scales & 0x7F) == 0x7F] = 0  # NaN
        return groups.reshape(ROWS, -1)
    scales = random.uniform(1e-3, 1, len(groups)) * random.choice([-1, 1], len(groups))
    kind = np.float32 if isinstance(each, Groups) else np.float16
    stored = scales.astype(kind).view(np.uint8).reshape(len(groups), -1)
    groups[:, : stored.shape[1]] = stored
    if each.has_zeros and each.family == "int4":
        groups[:, 4] %= 17  # GPTQ's are 1 to 16.
    if each.family == "e4m3":
        groups[:, 4:][(groups[:, 4:] & 0x7F) == 0x7F] = 0  # NaN
    return groups.reshape(ROWS, -1)


@pytest.mark.parametrize("warp_size", long_after(1, [32, 64]))
def test_a_packed_number_is_the_stored_one(warp_size):
    def main(comm: kccl.Communicator) -> None:
        module = kccl.compile(
            source(), ["multiply"], target="sim", warp_size=warp_size, include_dirs=[KERNELS]
        )
        packed, staged = np.zeros(1 << 14, np.uint8), np.zeros(128, np.uint8)
        for i, (each, _) in enumerate(FORMATS.values()):
            rows = stored_rows(each)
            out, fours = np.zeros((2, ROWS, COLUMNS), np.float32)
            arrays = (array.ctypes.data for array in (out, fours, packed, staged, rows))
            module.kernel("multiply")(comm, *arrays, i, grid=1, block=warp_size)
            wanted = each.to_float32(rows)
            np.testing.assert_array_equal(fours, wanted)
            np.testing.assert_array_equal(out, wanted)

    kccl.run_threads(main, 1, backend="sim", warp_size=warp_size)
