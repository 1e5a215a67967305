// Converts blocks of GGUF, as files store them, to those of formats/nested.py, on the device. The
// host then only reads. The numbers are those of nested() in formats/blocks32.py and blocks256.py.
//
// A format of files F has:
//
//   F::kColumns, kBytes            the columns and bytes of a block
//   F::kScaled                     the columns of a scale
//   F::kZero                       the integer that means 0
//   F::factor(block)               the bits of the FP16 factor
//   F::subtrahend(block)           those of the FP16 factor of the minimums, which are subtracted
//   F::scale(block, i)             scale i
//   F::minimum(block, i)           the minimum of columns 32 i to 32 i + 31
//   F::integer(block, i, column)   the integer of one of these 32 columns
#pragma once

#include "formats/nested4.cuh"
#include "formats/nested6.cuh"

namespace kccl::decode {

KCCL_DECODE void store_byte(uint8_t* to, uint32_t bits) {
    mem::store_plain(to, static_cast<uint8_t>(bits));
}
// Blocks begin at any byte.
KCCL_DECODE void store_half(uint8_t* to, uint32_t bits) {
    store_byte(to, bits);
    store_byte(to + 1, bits >> 8);
}

// Blocks of 32 integers: an FP16 factor, an FP16 minimum that is added if there is one, the fifth
// bits of integers of 5 bits, and the other four.
template <uint32_t BITS, bool HAS_MINIMUM>
struct File32 {
    static constexpr uint32_t kColumns = 32, kScaled = 32;
    static constexpr uint32_t kFifthsAt = HAS_MINIMUM ? 4 : 2;
    static constexpr uint32_t kFoursAt = kFifthsAt + (BITS > 4 ? 4 : 0), kBytes = kFoursAt + 16;
    // (integer - 8) * factor is integer * factor - factor * 8.
    static constexpr bool kIsLessEight = !HAS_MINIMUM && BITS == 4;
    static constexpr uint32_t kZero = HAS_MINIMUM || kIsLessEight ? 0 : 16;

    KCCL_DECODE static uint32_t factor(const uint8_t* block) { return half_at(block); }
    KCCL_DECODE static uint32_t subtrahend(const uint8_t* block) {
        constexpr uint32_t kSign = 0x8000;
        if constexpr (HAS_MINIMUM) return half_at(block + 2) ^ kSign;
        return kIsLessEight ? half_at(block) : 0;
    }
    KCCL_DECODE static uint32_t scale(const uint8_t*, uint32_t) { return 1; }
    KCCL_DECODE static uint32_t minimum(const uint8_t*, uint32_t) { return kIsLessEight ? 8 : 1; }
    KCCL_DECODE static uint32_t integer(const uint8_t* block, uint32_t, uint32_t column) {
        const uint32_t two = mem::load_plain(block + kFoursAt + column % 16);
        const uint32_t four = two >> column / 16 * 4 & 0xf;
        if constexpr (BITS == 4) return four;
        const uint32_t eight = mem::load_plain(block + kFifthsAt + column / 8);
        return four | (eight >> column % 8 & 1) << 4;
    }
};

// Q4_K and Q5_K: 256 integers, and for each 32 a scale and a minimum of 6 bits.
template <uint32_t BITS>
struct FileOfMinimums {
    static constexpr uint32_t kColumns = 256, kScaled = 32, kZero = 0;
    static constexpr uint32_t kScalesAt = 4, kFifthsAt = 16;
    static constexpr uint32_t kFoursAt = kFifthsAt + (BITS > 4 ? 32 : 0), kBytes = kFoursAt + 128;

    KCCL_DECODE static uint32_t factor(const uint8_t* block) { return half_at(block); }
    KCCL_DECODE static uint32_t subtrahend(const uint8_t* block) { return half_at(block + 2); }
    KCCL_DECODE static uint32_t scale(const uint8_t* block, uint32_t i) {
        return sixes(block + kScalesAt, i, 0);
    }
    KCCL_DECODE static uint32_t minimum(const uint8_t* block, uint32_t i) {
        return sixes(block + kScalesAt, i, 4);
    }
    KCCL_DECODE static uint32_t integer(const uint8_t* block, uint32_t i, uint32_t column) {
        const uint32_t two = mem::load_plain(block + kFoursAt + i / 2 * 32 + column);
        const uint32_t four = two >> i % 2 * 4 & 0xf;
        if constexpr (BITS == 4) return four;
        return four | (uint32_t{mem::load_plain(block + kFifthsAt + column)} >> i & 1) << 4;
    }

  private:
    // The first four scales are the lower 6 bits of bytes 0 to 3, the first four minimums those of
    // bytes 4 to 7. Bytes 8 to 11 have the lower 4 bits of the others, scales first; their upper
    // bits are those of bytes 0 to 7. first: 0 for scales, 4 for minimums.
    KCCL_DECODE static uint32_t sixes(const uint8_t* packed, uint32_t i, uint32_t first) {
        const uint32_t own = mem::load_plain(packed + first + i % 4);
        if (i < 4) return own & 63;
        return (uint32_t{mem::load_plain(packed + 4 + i)} >> first & 0xf) | own >> 6 << 4;
    }
};

// Q6_K: 256 integers, and a signed scale for each 16.
struct FileOfSixes {
    static constexpr uint32_t kColumns = 256, kScaled = 16, kZero = 32;
    static constexpr uint32_t kUpperAt = 128, kScalesAt = 192, kFactorAt = 208, kBytes = 210;

    KCCL_DECODE static uint32_t factor(const uint8_t* block) { return half_at(block + kFactorAt); }
    KCCL_DECODE static uint32_t subtrahend(const uint8_t*) { return 0; }
    KCCL_DECODE static uint32_t scale(const uint8_t* block, uint32_t i) {
        return mem::load_plain(block + kScalesAt + i);
    }
    KCCL_DECODE static uint32_t minimum(const uint8_t*, uint32_t) { return 0; }
    KCCL_DECODE static uint32_t integer(const uint8_t* block, uint32_t i, uint32_t column) {
        const uint32_t half = i / 4, in_half = i % 4;
        const uint32_t two = mem::load_plain(block + half * 64 + in_half % 2 * 32 + column);
        const uint32_t four = mem::load_plain(block + kUpperAt + half * 32 + column);
        return (two >> in_half / 2 * 4 & 0xf) | (four >> in_half * 2 & 3) << 4;
    }
};

// Named as files name them.
using FileQ40 = File32<4, false>;
using FileQ41 = File32<4, true>;
using FileQ50 = File32<5, false>;
using FileQ51 = File32<5, true>;
using FileQ4K = FileOfMinimums<4>;
using FileQ5K = FileOfMinimums<5>;
using FileQ6K = FileOfSixes;

// Where rows of a matrix lie in a product, as weights.py joins matrices. Row i is row
// i / group * stride + offset + i % group. If head is not 0, the two halves of each `head` rows
// take turns there.
struct RowsOfProduct {
    uint64_t group, stride, offset, head;

    KCCL_DECODE uint64_t place_of(uint64_t row) const {
        uint64_t in_group = row % group;
        if (head != 0) {
            const uint64_t in_head = in_group % head, half = head / 2;
            in_group += in_head % half * 2 + in_head / half - in_head;
        }
        return row / group * stride + offset + in_group;
    }
};

// Writes rows of a matrix to a product. F: their format in the file. FORM: the product's, whose
// blocks have as many columns or fewer. Called by all threads of a grid.
//
// blocks: the rows from `first` of the matrix on, each with `columns` columns.
template <class F, class FORM>
KCCL_DECODE void nest(uint8_t* out, const uint8_t* blocks, uint64_t rows, uint64_t columns,
                      uint64_t first, RowsOfProduct of_product) {
    static_assert(F::kColumns % FORM::kColumns == 0, "a block becomes whole blocks");
    // A thread converts 32 columns.
    constexpr uint32_t kPart = 32, kParts = FORM::kColumns / kPart;
    constexpr uint32_t kScales = kPart / FORM::kScaled;
    const uint64_t of_row = columns / kPart;
    const uint64_t step = uint64_t{platform::blocks_per_grid()} * platform::threads_per_block();
    const uint64_t begin = uint64_t{platform::block_in_grid()} * platform::threads_per_block() +
                           platform::thread_in_block();
    for (uint64_t i = begin; i < rows * of_row; i += step) {
        const uint64_t row = i / of_row, part = i % of_row;
        const uint8_t* const from = blocks + i * kPart / F::kColumns * F::kBytes;
        const auto of_file = static_cast<uint32_t>(part % (F::kColumns / kPart));
        const auto of_form = static_cast<uint32_t>(part % kParts);
        const uint64_t part_at = of_product.place_of(first + row) * of_row + part;
        uint8_t* const to = out + part_at / kParts * FORM::kBlockBytes;
        if (of_form == 0) {
            store_half(to, F::factor(from));
            store_half(to + 2, F::subtrahend(from));
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kScales; ++k) {
            const uint32_t scale =
                F::scale(from, (of_file * kPart + k * FORM::kScaled) / F::kScaled);
            store_byte(to + FORM::kScalesOfBlock + of_form * kScales + k, scale);
        }
        store_byte(to + FORM::kMinimumsOfBlock + of_form, F::minimum(from, of_file));
        uint32_t integers[kPart];
        KCCL_UNROLL
        for (uint32_t k = 0; k < kPart; ++k) {
            integers[k] = F::integer(from, of_file, k) + FORM::kZero - F::kZero;
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kPart / 2; ++k) {
            const uint32_t two = (integers[k] & 0xf) | integers[k + kPart / 2] << 4;
            store_byte(to + FORM::kIntegersAt + of_form * (kPart / 2) + k, two);
        }
        if constexpr (FORM::kHasUpper) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kPart / 4; ++k) {
                uint32_t four = 0;
                KCCL_UNROLL
                for (uint32_t j = 0; j < 4; ++j) {
                    four |= integers[k + j * (kPart / 4)] >> 4 << 2 * j;
                }
                store_byte(to + FORM::kUpperAt + of_form * (kPart / 4) + k, four);
            }
        }
    }
}

}  // namespace kccl::decode
