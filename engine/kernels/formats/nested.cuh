// The common base of formats whose scales have two levels, and whose weights have minimums. The
// twin of formats/nested.py, which says how a block of COLUMNS columns is stored.
//
// A strip has the FP16 factors of its rows, and a byte for each scale and each minimum of its
// tiles: the number plus 128. Integers less ZERO become FP16. A minimum
// multiplies the sum of the vector over its columns. The matrix unit makes that sum as well, as a
// product with ones. So both sums are FP32, and weights are never rounded.
#pragma once

#include "../format.cuh"
#include "integers.cuh"

namespace kccl::decode {

// Blocks begin at any byte.
KCCL_DECODE uint32_t half_at(const uint8_t* from) {
    return mem::load_plain(from) | uint32_t{mem::load_plain(from + 1)} << 8;
}

template <uint32_t BITS, uint32_t ZERO, uint32_t SCALED, uint32_t COLUMNS, uint32_t STRIP>
struct Nested {
    using Operand = WideF16;
    using Unit = Mma<Operand>;
    static_assert(BITS == 4 || BITS == 6, "the integers of GGUF's blocks");
    static_assert(COLUMNS % (STRIP * kTileColumns) == 0, "a strip lies in a block");
    static constexpr bool kHasMinimums = true, kHasUpper = BITS > 4;
    static constexpr uint32_t kColumns = COLUMNS, kScaled = SCALED, kZero = ZERO;
    static constexpr uint32_t kStripTiles = STRIP, kLowered = 32;
    // The tiles of a strip that share a scale, and those that share a minimum.
    static constexpr uint32_t kScaledTiles = least_of(SCALED / kTileColumns, STRIP);
    static constexpr uint32_t kLoweredTiles = least_of(kLowered / kTileColumns, STRIP);
    static constexpr uint32_t kScales = STRIP / kScaledTiles, kMinimums = STRIP / kLoweredTiles;
    static constexpr uint32_t kTileBytes = kTileRows * kTileColumns * BITS / 8;
    // A tile has the lower bits of all integers first.
    static constexpr uint32_t kLowerBytes = kTileRows * kTileColumns / 2;
    // Behind the tiles of a strip: the factors, the subtrahends, the scales, the minimums.
    static constexpr uint32_t kSubtrahendsAt = kTileRows * 2, kScalesAt = 2 * kSubtrahendsAt;
    static constexpr uint32_t kMinimumsAt = kScalesAt + kTileRows * kScales;
    static constexpr uint32_t kScaleBytes = kMinimumsAt + kTileRows * kMinimums;
    // In a stored block: the factor, the subtrahend, and then these.
    static constexpr uint32_t kScalesOfBlock = 4;
    static constexpr uint32_t kMinimumsOfBlock = kScalesOfBlock + COLUMNS / SCALED;
    static constexpr uint32_t kIntegersAt = kMinimumsOfBlock + COLUMNS / kLowered;
    static constexpr uint32_t kUpperAt = kIntegersAt + COLUMNS / 2;
    static constexpr uint32_t kBlockBytes = kIntegersAt + COLUMNS * BITS / 8;

    template <bool HAS_UPPER, int = 0>
    struct Packed {
        typename Unit::template Packed<4> lower;
    };
    template <int I>
    struct Packed<true, I> {
        typename Unit::template Packed<4> lower;
        typename Unit::template Packed<2> upper;
    };
    using Stored = Packed<kHasUpper>;

    struct Scales {
        typename Unit::template Scales<f16> factor, subtrahend;
        typename Unit::template RowBytes<kScales> scales;
        typename Unit::template RowBytes<kMinimums> minimums;
    };

    template <class Lane>
    KCCL_DECODE static Stored load(const Lane& lane, const uint8_t* tile) {
        if constexpr (kHasUpper) {
            return {lane.template packed<4>(tile), lane.template packed<2>(tile + kLowerBytes)};
        } else {
            return {lane.template packed<4>(tile)};
        }
    }
    template <class Lane>
    KCCL_DECODE static Scales scales(const Lane& lane, const uint8_t* scales) {
        return {lane.template scales<f16>(scales),
                lane.template scales<f16>(scales + kSubtrahendsAt),
                lane.template row_bytes<kScales>(scales + kScalesAt),
                lane.template row_bytes<kMinimums>(scales + kMinimumsAt)};
    }
    // Drops the scales and minimums of a strip's first tiles.
    KCCL_DECODE static void skip(Scales& scales, uint32_t tiles) {
        scales.scales.skip(tiles / kScaledTiles);
        scales.minimums.skip(tiles / kLoweredTiles);
    }
    // What add_scaled() takes for the sums of scale i of a strip.
    KCCL_DECODE static auto scale(const Scales& scales, uint32_t i) {
        return Unit::scaled(scales.factor, scales.scales, i);
    }
    // What add_scaled() takes for the sums that ones() gives for minimum i.
    KCCL_DECODE static auto minimum(const Scales& scales, uint32_t i) {
        return Unit::scaled(scales.subtrahend, scales.minimums, i);
    }

    KCCL_DECODE static typename Unit::Weights operand(const Stored& stored, const Scales&) {
        constexpr uint32_t kNum = sizeof(stored.lower) / sizeof(uint32_t);
        uint64_t fours[2 * kNum];
        KCCL_UNROLL
        for (uint32_t i = 0; i < 2 * kNum; ++i) {
            const uint32_t lower = stored.lower.word[i / 2];
            if constexpr (kHasUpper) {
                const uint32_t upper = stored.upper.word[i / 4] >> i / 2 % 2 * 16;
                fours[i] = halves_of_sixes<ZERO>(lower, upper, i % 2);
            } else {
                fours[i] = halves_of_nibbles(lower, i % 2, ZERO * 0x101);
            }
        }
        return Unit::words_of(fours);
    }
    // A tile of ones.
    KCCL_DECODE static typename Unit::Weights ones() {
        constexpr uint32_t kNum = sizeof(typename Unit::Weights) / sizeof(uint64_t);
        uint64_t fours[kNum];
        KCCL_UNROLL
        for (uint64_t& four : fours) four = 0x3c003c003c003c00;
        return Unit::words_of(fours);
    }

    KCCL_DECODE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        constexpr uint32_t kOfWord = 8, kWords = kTileRows * kTileColumns / kOfWord;
        for (uint32_t at = warp().index(); at < kWords; at += warp().size()) {
            uint32_t lower = 0, upper = 0;
            KCCL_UNROLL
            for (uint32_t i = 0; i < kOfWord; ++i) {
                const Place place = Unit::place_of(at * kOfWord + i);
                if (place.column >= num) continue;
                const uint64_t column = first + place.column;
                const uint8_t* const block = block_of(rows, row + place.row, column, columns);
                const uint32_t bits = bits_of(block, static_cast<uint32_t>(column % COLUMNS));
                lower |= (bits & 0xf) << bit_of_nibble(i);
                upper |= bits >> 4 << bit_of_upper(i);
            }
            mem::store_plain(reinterpret_cast<uint32_t*>(tile) + at, lower);
            if constexpr (kHasUpper) {
                mem::store_plain(reinterpret_cast<uint16_t*>(tile + kLowerBytes) + at,
                                 static_cast<uint16_t>(upper));
            }
        }
    }
    KCCL_DECODE static void pack_scales(uint8_t* scales, const uint8_t* rows, uint64_t row,
                                        uint64_t first, uint64_t columns, uint32_t num) {
        for (uint32_t at = warp().index(); at < kTileRows; at += warp().size()) {
            const uint8_t* const block = block_of(rows, row + at, first, columns);
            const auto within = static_cast<uint32_t>(first % COLUMNS);
            const uint32_t index = Unit::scale_at(at);
            auto* const factors = reinterpret_cast<uint16_t*>(scales);
            auto* const subtrahends = reinterpret_cast<uint16_t*>(scales + kSubtrahendsAt);
            const bool has = num != 0;
            // Minimums are subtracted, so the sign of their factor is turned over.
            constexpr uint32_t kSign = 0x8000;
            mem::store_plain(factors + index, static_cast<uint16_t>(has ? half_at(block) : 0));
            mem::store_plain(subtrahends + index,
                             static_cast<uint16_t>(has ? half_at(block + 2) ^ kSign : 0));
            pack_bytes<kScales>(scales + kScalesAt, index, block + kScalesOfBlock + within / SCALED,
                                has);
            pack_bytes<kMinimums>(scales + kMinimumsAt, index,
                                  block + kMinimumsOfBlock + within / kLowered, has);
        }
    }

    KCCL_DECODE static Float4 four(const uint8_t* rows, uint64_t i) {
        const uint8_t* const block = rows + i * 4 / COLUMNS * kBlockBytes;
        const auto first = static_cast<uint32_t>(i * 4 % COLUMNS);
        const float scale = factor_at(block) * byte_at(block + kScalesOfBlock + first / SCALED);
        const float minimum =
            factor_at(block + 2) * byte_at(block + kMinimumsOfBlock + first / kLowered);
        Float4 values;
        KCCL_UNROLL
        for (uint32_t k = 0; k < 4; ++k) {
            const float number = Integers::number(bits_of(block, first + k), ZERO);
            values.value[k] = rounded_product(number, scale) - minimum;
        }
        return values;
    }

  private:
    KCCL_DECODE static const uint8_t* block_of(const uint8_t* rows, uint64_t row, uint64_t column,
                                               uint64_t columns) {
        return rows + (row * columns + column) / COLUMNS * kBlockBytes;
    }
    KCCL_DECODE static uint32_t bits_of(const uint8_t* block, uint32_t column) {
        const uint32_t of_32 = column % 32, block_32 = column / 32;
        const uint32_t two = mem::load_plain(block + kIntegersAt + block_32 * 16 + of_32 % 16);
        const uint32_t lower = two >> of_32 / 16 * 4 & 0xf;
        if constexpr (!kHasUpper) return lower;
        const uint32_t four = mem::load_plain(block + kUpperAt + block_32 * 8 + of_32 % 8);
        return lower | (four >> of_32 / 8 * 2 & 3) << 4;
    }
    KCCL_DECODE static float factor_at(const uint8_t* from) {
        return Element<f16>::widen({static_cast<uint16_t>(half_at(from))});
    }
    KCCL_DECODE static float byte_at(const uint8_t* from) {
        return byte_less_128(mem::load_plain(from) ^ 0x80u);
    }
    template <uint32_t NUM>
    KCCL_DECODE static void pack_bytes(uint8_t* to, uint32_t index, const uint8_t* from, bool has) {
        for (uint32_t i = 0; i < NUM; ++i) {
            const uint32_t bits = has ? mem::load_plain(from + i) : 0u;
            mem::store_plain(to + index * NUM + i, static_cast<uint8_t>(bits ^ 0x80));
        }
    }
};

}  // namespace kccl::decode
