// The common base of formats with floats of 4 bits, e2m1 (mxfp4.h, nvfp4.h). Twice such a number is
// an integer from -12 to 12. A table turns the 4 bits into this integer plus 12, which is then
// multiplied.
#pragma once

#include "planes.h"

namespace kccl::engine {

struct E2m1 : Planes<4> {
    static constexpr bool kIsInteger = true;
    static constexpr int32_t kZero = 12;
    // kIntegers[bits] is twice the number that these 4 bits mean, plus kZero.
    static constexpr uint8_t kIntegers[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                              12, 11, 10, 9,  8,  6,  4,  0};
    static constexpr bool kHasMinimums = false;

    // Returns twice the number that a column has in a stored block of 32. Byte i of the block has
    // the number of column i in its lower half, and that of column i + 16 in its upper half.
    static int32_t twice(const uint8_t* block, uint32_t column) {
        return kIntegers[block[column % 16] >> column / 16 * 4 & 15] - kZero;
    }
};

}  // namespace kccl::engine
