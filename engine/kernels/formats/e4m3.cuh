// FP8 e4m3fn with a scale for a group of COLUMNS columns. The twin of formats/e4m3.py. STRIP tiles
// of a warp share the scales of their rows: they lie in one group.
//
// A number has a sign, 4 bits of exponent and 3 of mantissa. FP16 holds all of them exactly, and
// NVIDIA's GPUs convert two in one instruction. BF16 would take four. The vectors' range does not
// suffer: WideF16 in mma.cuh.
#pragma once

#include "../format.cuh"

#if defined(KCCL_TARGET_CUDA)
#include "../targets/e4m3_cuda.cuh"
#else
#include "../targets/e4m3_exact.cuh"
#endif

namespace kccl::decode {

template <uint32_t COLUMNS, uint32_t STRIP>
struct E4m3 {
    using Operand = WideF16;
    using Unit = Mma<Operand>;
    using Stored = typename Unit::Bytes;
    using Lane = typename Unit::Lane;
    static_assert(COLUMNS % (STRIP * kTileColumns) == 0, "a strip lies in a group");
    static constexpr uint32_t kTileBytes = decode::kTileBytes / 2, kStripTiles = STRIP;
    static constexpr uint32_t kScaleBytes = kTileRows * sizeof(float);
    // A stored group: its scale, then its numbers.
    static constexpr uint32_t kGroupBytes = sizeof(float) + COLUMNS;

    KCCL_DECODE static Stored load(const Lane& lane, const uint8_t* tile) {
        return lane.bytes(tile);
    }
    KCCL_DECODE static typename Unit::Scales scales(const Lane& lane, const uint8_t* scales) {
        return lane.scales(scales);
    }
    KCCL_DECODE static typename Unit::Weights operand(const Stored& stored) {
        constexpr uint32_t kNum = sizeof(Stored) / sizeof(uint32_t);
        uint64_t fours[kNum];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) fours[i] = halves_of_e4m3(stored.word[i]);
        return Unit::words_of(fours);
    }

    KCCL_DECODE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        for (uint32_t at = warp().index(); at < kTileRows * kTileColumns; at += warp().size()) {
            const uint32_t in_tile = at / kTileColumns, within = at % kTileColumns;
            const uint8_t* const from = group_of(rows, row + in_tile, first + within, columns) +
                                        sizeof(float) + (first + within) % COLUMNS;
            const uint8_t value = within < num ? mem::load_plain(from) : uint8_t{0};
            mem::store_plain(tile + Unit::offset(in_tile, within) / 2, value);
        }
    }
    KCCL_DECODE static void pack_scales(uint8_t* scales, const uint8_t* rows, uint64_t row,
                                        uint64_t first, uint64_t columns, uint32_t num) {
        for (uint32_t at = warp().index(); at < kTileRows; at += warp().size()) {
            const float scale = num != 0 ? scale_of(group_of(rows, row + at, first, columns)) : 0;
            mem::store_plain(reinterpret_cast<float*>(scales + Unit::scale_offset(at)),
                             scale * kHalvesToE4m3);
        }
    }

    KCCL_DECODE static Float4 four(const uint8_t* rows, uint64_t i) {
        const uint8_t* const group = rows + i * 4 / COLUMNS * kGroupBytes;
        const float scale = scale_of(group);
        Float4 values;
        KCCL_UNROLL
        for (uint32_t k = 0; k < 4; ++k) {
            const uint8_t bits = mem::load_plain(group + sizeof(float) + i * 4 % COLUMNS + k);
            values.value[k] = rounded_product(Element<f8e4m3>::widen({bits}), scale);
        }
        return values;
    }

  private:
    KCCL_DECODE static const uint8_t* group_of(const uint8_t* rows, uint64_t row, uint64_t column,
                                               uint64_t columns) {
        return rows + (row * columns + column) / COLUMNS * kGroupBytes;
    }
    // A group begins at a multiple of four bytes.
    KCCL_DECODE static float scale_of(const uint8_t* group) {
        return mem::load_plain(reinterpret_cast<const float*>(group));
    }
};

}  // namespace kccl::decode
