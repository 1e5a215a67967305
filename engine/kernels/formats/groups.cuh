// The common base of formats whose rows are cut into groups of COLUMNS columns, each with a scale,
// and with a zero point if it HAS_ZEROS. The twin of formats/groups.py, and of GGUF's blocks that
// have a scale in FP16. STRIP tiles of a warp share scales and zero points of their rows: they lie
// in one group.
//
// A stored group is a scale of type SCALE (float, f16, or a type of one byte: mxfp4.cuh), the zero
// point of 8 bits, and the numbers. Two numbers of 4 bits lie in a byte: of 32 columns, byte i has
// columns i and i + 16. NUMBERS says what the bits of a number mean:
//
//   kBits                    8 or 4
//   kFlips                   the bits of a stored number that are turned over in a packed tile
//   kZero                    the zero point of packed numbers, if groups have none
//   kScaleFactor             packed scales are so many times as large as stored ones
//   placed(bits, i)          the bits of number i, where a packed word has them
//   operand<Unit>(stored, zeros)
//                            what the unit multiplies. zeros: two bytes, the zero points of the
//                            lower and of the upper two of four neighbouring numbers
//   number(bits, zero)       what the bits of a packed number mean, without the scale
#pragma once

#include "../format.cuh"

namespace kccl::decode {

// This thread's scales of a strip.
template <class FACTORS, bool HAS_ZEROS>
struct ScalesAndZeros {
    FACTORS factors;
};
template <class FACTORS>
struct ScalesAndZeros<FACTORS, true> {
    FACTORS factors;
    uint32_t zeros;
};

template <class NUMBERS, class SCALE, bool HAS_ZEROS, uint32_t COLUMNS, uint32_t STRIP>
struct Groups {
    using Operand = WideF16;
    using Unit = Mma<Operand>;
    using Stored = typename Unit::template Packed<NUMBERS::kBits>;
    using Scales = ScalesAndZeros<typename Unit::template Scales<SCALE>, HAS_ZEROS>;
    static_assert(COLUMNS % (STRIP * kTileColumns) == 0, "a strip lies in a group");
    static constexpr bool kHasMinimums = false;
    static constexpr uint32_t kBits = NUMBERS::kBits, kStripTiles = STRIP;
    static constexpr uint32_t kTileBytes = kTileRows * kTileColumns * kBits / 8;
    static constexpr uint32_t kFactorBytes = kTileRows * sizeof(SCALE);
    static constexpr uint32_t kScaleBytes = kFactorBytes + (HAS_ZEROS ? kTileRows : 0);
    static constexpr uint32_t kNumbersAt = sizeof(SCALE) + (HAS_ZEROS ? 1 : 0);
    static constexpr uint32_t kGroupBytes = kNumbersAt + COLUMNS * kBits / 8;

    template <class Lane>
    KCCL_DECODE static Stored load(const Lane& lane, const uint8_t* tile) {
        return lane.template packed<kBits>(tile);
    }
    template <class Lane>
    KCCL_DECODE static Scales scales(const Lane& lane, const uint8_t* scales) {
        const auto factors = lane.template scales<SCALE>(scales);
        if constexpr (HAS_ZEROS) {
            return {factors, lane.zeros(scales + kFactorBytes)};
        } else {
            return {factors};
        }
    }
    KCCL_DECODE static typename Unit::Weights operand(const Stored& stored, const Scales& scales) {
        if constexpr (HAS_ZEROS) {
            return NUMBERS::template operand<Unit>(stored, scales.zeros);
        } else {
            return NUMBERS::template operand<Unit>(stored, NUMBERS::kZero * 0x101);
        }
    }

    KCCL_DECODE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        pack_words(rows, row, first, columns, num, [&](uint32_t at, uint32_t word) {
            mem::store_plain(reinterpret_cast<uint32_t*>(tile) + at, word);
        });
    }
    // Calls store(at, word) for each word of a packed tile.
    template <class Store>
    KCCL_DECODE static void pack_words(const uint8_t* rows, uint64_t row, uint64_t first,
                                       uint64_t columns, uint32_t num, Store store) {
        constexpr uint32_t kOfWord = 32 / kBits, kWords = kTileBytes / sizeof(uint32_t);
        for (uint32_t at = warp().index(); at < kWords; at += warp().size()) {
            uint32_t word = 0;
            KCCL_UNROLL
            for (uint32_t i = 0; i < kOfWord; ++i) {
                const Place place = Unit::place_of(at * kOfWord + i);
                if (place.column >= num) continue;
                const uint64_t column = first + place.column;
                const uint8_t* const group = group_of(rows, row + place.row, column, columns);
                word |= NUMBERS::placed(bits_of(group, static_cast<uint32_t>(column % COLUMNS)), i);
            }
            store(at, word);
        }
    }
    KCCL_DECODE static void pack_scales(uint8_t* scales, const uint8_t* rows, uint64_t row,
                                        uint64_t first, uint64_t columns, uint32_t num) {
        for (uint32_t at = warp().index(); at < kTileRows; at += warp().size()) {
            const uint8_t* const group = group_of(rows, row + at, first, columns);
            const uint32_t index = Unit::scale_at(at);
            [[maybe_unused]] const float scale =
                num != 0 ? scale_of(group) * NUMBERS::kScaleFactor : 0;
            if constexpr (sizeof(SCALE) == 1) {
                const uint8_t bits = num != 0 ? SCALE::packed(mem::load_plain(group)) : uint8_t{0};
                mem::store_plain(scales + index, bits);
            } else if constexpr (sizeof(SCALE) == sizeof(float)) {
                mem::store_plain(reinterpret_cast<float*>(scales) + index, scale);
            } else {
                mem::store_plain(reinterpret_cast<uint16_t*>(scales) + index,
                                 Element<SCALE>::narrow(scale).bits);
            }
            if constexpr (HAS_ZEROS) {
                const uint8_t zero = num != 0 ? zero_of(group) : uint8_t{0};
                mem::store_plain(scales + kFactorBytes + index, zero);
            }
        }
    }

    KCCL_DECODE static Float4 four(const uint8_t* rows, uint64_t i) {
        const uint8_t* const group = rows + i * 4 / COLUMNS * kGroupBytes;
        const float scale = scale_of(group);
        const uint32_t zero = HAS_ZEROS ? zero_of(group) : NUMBERS::kZero;
        Float4 values;
        KCCL_UNROLL
        for (uint32_t k = 0; k < 4; ++k) {
            const uint32_t bits = bits_of(group, static_cast<uint32_t>(i * 4 % COLUMNS) + k);
            values.value[k] = rounded_product(NUMBERS::number(bits, zero), scale);
        }
        return values;
    }

  private:
    KCCL_DECODE static const uint8_t* group_of(const uint8_t* rows, uint64_t row, uint64_t column,
                                               uint64_t columns) {
        return rows + (row * columns + column) / COLUMNS * kGroupBytes;
    }
    // The bits of a number as a packed tile has them.
    KCCL_DECODE static uint32_t bits_of(const uint8_t* group, uint32_t column) {
        const uint8_t* const numbers = group + kNumbersAt;
        if constexpr (kBits == 8) return mem::load_plain(numbers + column) ^ NUMBERS::kFlips;
        const uint32_t two = mem::load_plain(numbers + column / 32 * 16 + column % 16);
        return (two >> column % 32 / 16 * 4 & 0xf) ^ NUMBERS::kFlips;
    }
    // Groups begin at any byte.
    KCCL_DECODE static float scale_of(const uint8_t* group) {
        uint32_t bits = 0;
        KCCL_UNROLL
        for (uint32_t i = 0; i < sizeof(SCALE); ++i) {
            bits |= uint32_t{mem::load_plain(group + i)} << 8 * i;
        }
        if constexpr (sizeof(SCALE) == 1) {
            return SCALE::number(static_cast<uint8_t>(bits));
        } else if constexpr (sizeof(SCALE) == sizeof(float)) {
            return platform::bit_cast<float>(bits);
        } else {
            return Element<SCALE>::widen({static_cast<uint16_t>(bits)});
        }
    }
    KCCL_DECODE static uint8_t zero_of(const uint8_t* group) {
        return mem::load_plain(group + sizeof(SCALE));
    }
};

}  // namespace kccl::decode
