// MXFP4: blocks of 32 floats of 4 bits, e2m1, with a power of two as the scale. The twin of
// formats/mxfp4.py.
//
// A panel has the file's 4 bits, which e2m1.h turns into integers twice as large, and scales half
// as large. A piece of a panel holds a block of 16 rows:
//
//     planes.h                            numbers
//     [row]                               scales: the file's byte, plus 128 modulo 256
//
// The scales of rows behind a panel's last one are zeros. Because of the 128, a zero means an
// ordinary scale. A block whose numbers are all zero gets the same scale. Its own might be
// subnormal in FP32, which would be slow on some CPUs.
#pragma once

#include "e2m1.h"

namespace kccl::engine {

struct Mxfp4 : E2m1 {
    static constexpr const char* kName = "mxfp4";
    static constexpr uint32_t kScalesOfBlock = 1;
    static constexpr uint32_t kBlocks = 1;
    static constexpr uint32_t kPairs = 16;
    static constexpr uint32_t kScalesAt = kRows * kBlockBytes;
    static constexpr uint32_t kPieceBytes = kScalesAt + kRows;
    static constexpr uint32_t kNumbersAt = 1;
    static constexpr uint32_t kStoredBytes = kNumbersAt + kBlockBytes;

    static constexpr uint64_t stored_bytes(uint32_t num_columns) {
        return uint64_t{num_columns} / 32 * kStoredBytes;
    }

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        for (uint32_t row = 0; row < num_rows; ++row) {
            const uint8_t* from = rows + row * stored_bytes(num_columns);
            uint8_t* piece = panel;
            for (uint32_t block = 0; block < num_columns / 32; ++block) {
                uint32_t numbers = 0;
                for (uint32_t quad = 0; quad < 4; ++quad) {
                    const uint32_t both = word_at(from + kNumbersAt + 4 * quad);
                    memcpy(piece + 4 * (quad * kRows + row), &both, sizeof(both));
                    numbers |= both & kSizes;
                }
                if (numbers != 0) piece[kScalesAt + row] = from[0] ^ 128;
                from += kStoredBytes;
                piece += kPieceBytes;
            }
        }
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t* block = stored + i / 32 * kStoredBytes;
            const uint8_t scale = block[0] ^ 128;
            const int32_t number = twice(block + kNumbersAt, i % 32);
            out[i] = static_cast<float>(number) * half_of<One>(&scale);
        }
    }

    // Returns half the scales of a vector of rows that begins at row `row` of a piece.
    template <class Vector>
    static typename Vector::Floats scales(const uint8_t* piece, uint32_t, uint32_t row, int) {
        return half_of<Vector>(piece + kScalesAt + row);
    }

  private:
    // A mask for the bits of eight numbers without their signs.
    static constexpr uint32_t kSizes = 0x77777777;

    template <class Vector>
    static typename Vector::Floats half_of(const uint8_t* scales) {
        const auto exponents = (Vector::byte_words(scales) + 128u) & 255u;
        // The scale is 2^(exponent - 127). Its FP32 number is subnormal if the exponent is 0.
        const auto is_zero = (exponents + 0xffffffffu) >> 31;
        return Vector::times(Vector::floats((exponents << 23) | (is_zero << 22)), 0.5f);
    }

    // A vector of one row, for which half_of() converts a single scale.
    struct One {
        using Floats = float;
        static uint32_t byte_words(const uint8_t* from) { return *from; }
        static float floats(uint32_t word) {
            float value;
            memcpy(&value, &word, sizeof(value));
            return value;
        }
        static float times(float a, float x) { return a * x; }
    };
};

}  // namespace kccl::engine
