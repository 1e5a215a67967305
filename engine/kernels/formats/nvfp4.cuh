// NVFP4: floats of 4 bits, e2m1, with a scale in e4m3 for 16 columns and an FP32 factor for
// COLUMNS. The twin of formats/nvfp4.py.
//
// FP16 holds each float times its scale exactly: 6 bits of mantissa, and nothing below 2^-10 or
// above 2688. A tile has 16 columns, and so a scale for each row, behind its floats. Floats are
// 2^-14 times as large (mxfp4.cuh), scales 2^7 times, and so packed factors are 2^7 times as large,
// too: a factor must be below 2^121.
#pragma once

#include "e4m3.cuh"
#include "mxfp4.cuh"

namespace kccl::decode {

template <uint32_t COLUMNS, uint32_t STRIP>
struct Nvfp4 {
    using Operand = WideF16;
    using Unit = Mma<Operand>;
    static_assert(COLUMNS % (STRIP * kTileColumns) == 0, "a strip lies in a group");
    static constexpr bool kHasMinimums = false;
    static constexpr uint32_t kStripTiles = STRIP, kScaled = 16;
    static constexpr uint32_t kFloatBytes = kTileRows * kTileColumns / 2;
    static constexpr uint32_t kTileBytes = kFloatBytes + kTileRows;
    static constexpr uint32_t kScaleBytes = kTileRows * sizeof(float);
    // In a stored group: the factor, the scales, the floats.
    static constexpr uint32_t kScalesAt = sizeof(float), kFloatsAt = kScalesAt + COLUMNS / kScaled;
    static constexpr uint32_t kGroupBytes = kFloatsAt + COLUMNS / 2;
    static constexpr float kToScale = 128;
    static_assert(kTileColumns == kScaled, "a tile has a scale for each row");

    struct Stored {
        typename Unit::template Packed<4> floats;
        uint32_t scales;  // a byte each: those of the first and of the last two of each four
    };
    struct Scales {
        typename Unit::template Scales<float> factors;
    };

    template <class Lane>
    KCCL_DECODE static Stored load(const Lane& lane, const uint8_t* tile) {
        return {lane.template packed<4>(tile), lane.zeros(tile + kFloatBytes)};
    }
    template <class Lane>
    KCCL_DECODE static Scales scales(const Lane& lane, const uint8_t* scales) {
        return {lane.template scales<float>(scales)};
    }
    KCCL_DECODE static typename Unit::Weights operand(const Stored& stored, const Scales&) {
        constexpr uint32_t kTwo = 0x00010001;
        const uint32_t to_scale = Element<f16>::narrow(kToScale * kHalvesToE4m3).bits * kTwo;
        const auto halves = static_cast<uint32_t>(halves_of_e4m3(stored.scales));
        const uint32_t scales = times_pair(halves, to_scale);
        const uint32_t first = (scales & 0xffff) * kTwo, last = (scales >> 16) * kTwo;
        uint64_t fours[2 * sizeof(stored.floats) / sizeof(uint32_t)];
        E2m1Numbers::expand(stored.floats, fours);
        KCCL_UNROLL
        for (uint64_t& four : fours) {
            four = times_pair(static_cast<uint32_t>(four), first) |
                   uint64_t{times_pair(static_cast<uint32_t>(four >> 32), last)} << 32;
        }
        return Unit::words_of(fours);
    }

    KCCL_DECODE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        constexpr uint32_t kOfWord = 8, kWords = kFloatBytes / sizeof(uint32_t);
        for (uint32_t at = warp().index(); at < kWords; at += warp().size()) {
            uint32_t word = 0;
            KCCL_UNROLL
            for (uint32_t i = 0; i < kOfWord; ++i) {
                const Place place = Unit::place_of(at * kOfWord + i);
                if (place.column >= num) continue;
                const uint64_t column = first + place.column;
                const uint8_t* const group = group_of(rows, row + place.row, column, columns);
                const uint32_t bits = bits_of(group, static_cast<uint32_t>(column % COLUMNS));
                word |= E2m1Numbers::placed(bits, i);
            }
            mem::store_plain(reinterpret_cast<uint32_t*>(tile) + at, word);
        }
        for (uint32_t at = warp().index(); at < kTileRows; at += warp().size()) {
            const uint8_t* const group = group_of(rows, row + at, first, columns);
            const uint32_t scale = static_cast<uint32_t>(first % COLUMNS) / kScaled;
            mem::store_plain(tile + kFloatBytes + Unit::scale_at(at),
                             num != 0 ? mem::load_plain(group + kScalesAt + scale) : uint8_t{0});
        }
    }
    KCCL_DECODE static void pack_scales(uint8_t* scales, const uint8_t* rows, uint64_t row,
                                        uint64_t first, uint64_t columns, uint32_t num) {
        for (uint32_t at = warp().index(); at < kTileRows; at += warp().size()) {
            const uint8_t* const group = group_of(rows, row + at, first, columns);
            const float factor = num != 0 ? factor_of(group) * kToScale : 0;
            mem::store_plain(reinterpret_cast<float*>(scales) + Unit::scale_at(at), factor);
        }
    }

    KCCL_DECODE static Float4 four(const uint8_t* rows, uint64_t i) {
        const uint8_t* const group = rows + i * 4 / COLUMNS * kGroupBytes;
        const auto first = static_cast<uint32_t>(i * 4 % COLUMNS);
        const f8e4m3 stored = {mem::load_plain(group + kScalesAt + first / kScaled)};
        const float scale = rounded_product(Element<f8e4m3>::widen(stored), factor_of(group));
        Float4 values;
        KCCL_UNROLL
        for (uint32_t k = 0; k < 4; ++k) {
            const float number = E2m1Numbers::number(bits_of(group, first + k), 0);
            values.value[k] = rounded_product(number, scale);
        }
        return values;
    }

  private:
    KCCL_DECODE static const uint8_t* group_of(const uint8_t* rows, uint64_t row, uint64_t column,
                                               uint64_t columns) {
        return rows + (row * columns + column) / COLUMNS * kGroupBytes;
    }
    KCCL_DECODE static uint32_t bits_of(const uint8_t* group, uint32_t column) {
        const uint32_t two = mem::load_plain(group + kFloatsAt + column / 32 * 16 + column % 16);
        return two >> column % 32 / 16 * 4 & 0xf;
    }
    // Groups begin at any byte.
    KCCL_DECODE static float factor_of(const uint8_t* group) {
        uint32_t bits = 0;
        KCCL_UNROLL
        for (uint32_t i = 0; i < sizeof(float); ++i) {
            bits |= uint32_t{mem::load_plain(group + i)} << 8 * i;
        }
        return platform::bit_cast<float>(bits);
    }
};

}  // namespace kccl::decode
