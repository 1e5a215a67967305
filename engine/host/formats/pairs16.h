// The common base of formats with values of 16 bits. Their panels hold pairs of columns,
// [pair][row][2].
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "../api.h"

namespace kccl::engine {

struct Pairs16 {
    static constexpr bool kIsInteger = false;
    // How many pairs of columns a piece of a panel has.
    static constexpr uint32_t kPairs = 1;
    static constexpr uint32_t kPieceBytes = 2 * kKcclEnginePanelRows * sizeof(uint16_t);
    // How many bytes lie between the beginnings of two rows in a piece.
    static constexpr uint32_t kRowBytes = 2 * sizeof(uint16_t);

    static constexpr uint64_t stored_bytes(uint32_t num_columns) {
        return uint64_t{num_columns} * sizeof(uint16_t);
    }

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        for (uint32_t column = 0; column < num_columns; ++column) {
            uint8_t* to =
                panel + uint64_t{column / 2} * kPieceBytes + column % 2 * sizeof(uint16_t);
            const uint8_t* from = rows + stored_bytes(column);
            for (uint32_t row = 0; row < num_rows; ++row) {
                memcpy(to + row * kRowBytes, from + row * stored_bytes(num_columns),
                       sizeof(uint16_t));
            }
        }
    }
};

}  // namespace kccl::engine
