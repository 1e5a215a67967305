"""A kernel that packs rows of formats as the monokernel does, and multiplies column by column."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kccl.engine.formats.base import Format
from kccl.engine.formats.groups import Groups
from kccl.engine.formats.nested import Nested
from kccl.engine.formats.nvfp4 import Nvfp4
from kccl.engine.monokernel.sequence import type_of

ROWS, COLUMNS = 16, 256
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
            for (uint32_t k = 0; k < 4; ++k) {
                four.value[k] = within == 4 * warp().index() + k ? 1 : 0;
            }
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


def strip_of(each: Format) -> int:
    """The tiles of a strip: as many as a group has, or half of them."""
    return min(8, each.block // (32 if each.has_zeros else 16))


def source_of(formats: Iterable[Format]) -> str:
    """A kernel multiply(out, fours, packed, staged, rows, format), `format` counted from 0."""
    formats = list(formats)
    includes = sorted({each.family or each.name for each in formats})
    cases = (
        f"case {i}: multiply_columns<{type_of(each, strip_of(each))}>(out, fours, packed,"
        f" reinterpret_cast<StagedFloat4*>(staged), rows, {COLUMNS}); break;"
        for i, each in enumerate(formats)
    )
    lines = "\n".join(f'#include "formats/{name}.cuh"' for name in includes)
    return SOURCE.replace("INCLUDES", lines).replace("CASES", "\n        ".join(cases))


def stored_rows(each: Format) -> NDArray[np.uint8]:
    """ROWS rows of COLUMNS columns with all numbers that the format has. Scales and zero points are
    any that are right.
    """
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
