// The common base of formats whose weights are integers with a scale for a group of columns: weight
// = (stored - kZero) * scale, or (stored - zero point) * scale. A piece holds its blocks of 32
// columns as those of blocks32.h, then the scales, then the zero points minus kZero, a signed byte
// each.
#pragma once

#include "groups.h"

namespace kccl::engine {

// ZERO: the integer that a panel has for a weight of 0. FLIPPED: the bits in which a stored integer
// differs from a panel's.
template <uint32_t COLUMNS, uint32_t BITS, int32_t ZERO, bool HAS_ZEROS, uint8_t FLIPPED>
struct IntegerGroups : Groups<COLUMNS, BITS, HAS_ZEROS> {
    using Base = Groups<COLUMNS, BITS, HAS_ZEROS>;
    static constexpr bool kIsInteger = true;
    static constexpr int32_t kZero = ZERO;
    // A block of 32 columns has one scale, and no bits of a weight lie apart from the others.
    static constexpr uint32_t kScalesOfBlock = 1;
    static constexpr uint32_t kHighBits = 0;
    static constexpr uint32_t kBlockBytes = 32 * BITS / 8;

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        Base::each_group(panel, rows, num_rows, num_columns,
                         [](uint8_t* piece, uint32_t row, const uint8_t* group) {
                             for (uint32_t at = 0; at < Base::kGroupBytes; at += 4) {
                                 uint32_t four;
                                 memcpy(&four, group + Base::kWeightsAt + at, sizeof(four));
                                 four ^= FLIPPED * 0x01010101u;
                                 memcpy(piece + at * Base::kRows + 4 * row, &four, sizeof(four));
                             }
                             Base::put_scale(piece, row, Base::scale_of(group));
                             if constexpr (HAS_ZEROS) {
                                 const int32_t zero = group[Base::kZeroAt] - ZERO;
                                 piece[Base::kZerosAt + row] = static_cast<uint8_t>(zero);
                             }
                         });
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t* group = stored + uint64_t{i / COLUMNS} * Base::kStoredBytes;
            const uint32_t within = i % 32;
            const uint8_t* block = group + Base::kWeightsAt + i % COLUMNS / 32 * kBlockBytes;
            const uint8_t byte = block[BITS == 8 ? within : within % 16] ^ FLIPPED;
            const int32_t number = BITS == 8 ? byte : byte >> within / 16 * 4 & 15;
            int32_t zero = ZERO;
            if constexpr (HAS_ZEROS) zero = group[Base::kZeroAt];
            out[i] = static_cast<float>(number - zero) * Base::scale_of(group);
        }
    }

    // Returns the zero points, minus kZero, of a vector of rows that begins at row `row` of a
    // piece.
    template <class Vector>
    static typename Vector::Floats zeros(const uint8_t* piece, uint32_t row) {
        return Vector::bytes(reinterpret_cast<const int8_t*>(piece + Base::kZerosAt) + row);
    }
};

}  // namespace kccl::engine
