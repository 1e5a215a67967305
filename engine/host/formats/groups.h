// The common base of formats whose rows are cut into groups of columns, each with a scale in FP32,
// which multiplies the group's sum. A file's group is stored as
//
//     scale in FP32 | zero point, a byte, if there is one | weights
#pragma once

#include <stdint.h>
#include <string.h>

#include "float16.h"

namespace kccl::engine {

// COLUMNS: how many columns a group has, a multiple of kDigitGroup (digits.h). BITS: how many bits
// a weight has. HAS_ZEROS: whether a group has a zero point.
template <uint32_t COLUMNS, uint32_t BITS, bool HAS_ZEROS>
struct Groups {
    static constexpr uint32_t kGroupColumns = COLUMNS;
    static constexpr uint32_t kBits = BITS;
    static constexpr bool kHasZeros = HAS_ZEROS;
    static constexpr uint32_t kRows = kKcclEnginePanelRows;
    static constexpr uint32_t kPairs = COLUMNS / 2;
    static constexpr uint32_t kGroupBytes = COLUMNS * BITS / 8;
    // A piece of a panel holds one group of each of 16 rows: the weights, then the scales, [row],
    // then the zero points, [row], if there are any.
    static constexpr uint32_t kScalesAt = kRows * kGroupBytes;
    static constexpr uint32_t kScaleBytes = sizeof(float);
    static constexpr uint32_t kZerosAt = kScalesAt + kRows * kScaleBytes;
    static constexpr uint32_t kPieceBytes = kZerosAt + (HAS_ZEROS ? kRows : 0);
    static constexpr uint32_t kZeroAt = kScaleBytes;
    static constexpr uint32_t kWeightsAt = kZeroAt + (HAS_ZEROS ? 1 : 0);
    static constexpr uint32_t kStoredBytes = kWeightsAt + kGroupBytes;

    static constexpr uint64_t stored_bytes(uint32_t num_columns) {
        return uint64_t{num_columns} / COLUMNS * kStoredBytes;
    }

  protected:
    static float scale_of(const uint8_t* group) {
        float scale;
        memcpy(&scale, group, sizeof(scale));
        return scale;
    }
    static void put_scale(uint8_t* piece, uint32_t row, float scale) {
        memcpy(piece + kScalesAt + row * kScaleBytes, &scale, sizeof(scale));
    }

    // Calls use(piece of the panel, row, stored group) for each group of each of the stored rows.
    template <class Use>
    static void each_group(uint8_t* panel, const uint8_t* rows, uint32_t num_rows,
                           uint32_t num_columns, Use use) {
        for (uint32_t row = 0; row < num_rows; ++row) {
            const uint8_t* group = rows + row * stored_bytes(num_columns);
            for (uint32_t i = 0; i < num_columns / COLUMNS; ++i, group += kStoredBytes) {
                use(panel + uint64_t{i} * kPieceBytes, row, group);
            }
        }
    }
};

}  // namespace kccl::engine
