// query_mma.cuh on NVIDIA GPUs: mma.sync.m16n8k16, whose first operand are the queries. A tile of
// the cache has two operands of 8 columns. As in mma_cuda.cuh, thread q of four passes elements 4q
// to 4q + 3 of a vector, and the unit gets them in the same places. The thread's weights of
// positions 4q to 4q + 3 are therefore its part of the next operand: they stay in its registers.
#pragma once

namespace kccl::decode {

struct QueryMma {
    static constexpr bool kIsThere = true;
    static constexpr uint32_t kQueries = 16, kEach = 2;

    using Tile = Mma<f16>::Weights;
    struct Part {
        uint32_t word[4];
    };
    // The vectors' high and low parts.
    struct Rows {
        Part high;
        Part low;
    };
    // The sums of high and of low parts: [8 columns][query, column].
    struct Sums {
        float high[2][4];
        float low[2][4];
    };

    // The lane number is kept in a register, because reading the special register is slow.
    KCCL_DECODE QueryMma() : thread_(mem::forget(warp().index())) {}

    KCCL_DECODE uint32_t query(uint32_t i) const { return thread_ / 4 + 8 * i; }
    KCCL_DECODE uint32_t quad() const { return thread_ % 4; }
    KCCL_DECODE uint32_t element(uint32_t k) const { return k / 2 * 8 + quad() * 2 + k % 2; }

    KCCL_DECODE Tile tile(const uint8_t* from) const {
        return platform::bit_cast<Tile>(
            mem::load_plain(reinterpret_cast<const mem::Line*>(from) + thread_));
    }
    KCCL_DECODE Rows load(const StagedFloat4* const (&at)[kEach], uint32_t i) const {
        StagedFloat4 staged[kEach];
        KCCL_UNROLL
        for (uint32_t j = 0; j < kEach; ++j) {
            const auto* const from = reinterpret_cast<const mem::Line*>(at[j]);
            staged[j] =
                platform::bit_cast<StagedFloat4>(mem::load_plain(from + i * kTileFloat4s + quad()));
        }
        return rows(staged);
    }
    KCCL_DECODE Rows rows(const StagedFloat4 (&staged)[kEach]) const {
        return {
            {{staged[0].high[0], staged[1].high[0], staged[0].high[1], staged[1].high[1]}},
            {{staged[0].low[0], staged[1].low[0], staged[0].low[1], staged[1].low[1]}},
        };
    }

    KCCL_DECODE static void multiply(Sums& sums, const Rows& rows, const Tile& tile) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            multiply(sums.high[i], rows.high, tile.word[i], tile.word[i + 2]);
            multiply(sums.low[i], rows.low, tile.word[i], tile.word[i + 2]);
        }
    }
    KCCL_DECODE static void scale(Sums& sums, const float (&factors)[kEach]) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < 4; ++k) {
                sums.high[i][k] *= factors[k / 2];
                sums.low[i][k] *= factors[k / 2];
            }
        }
    }
    KCCL_DECODE static void totals(const Sums& sums, Float4 (&fours)[kEach]) {
        KCCL_UNROLL
        for (uint32_t j = 0; j < kEach; ++j) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < 4; ++k) {
                const uint32_t i = k / 2, at = 2 * j + k % 2;
                fours[j].value[k] = sums.high[i][at] + sums.low[i][at];
            }
        }
    }

  private:
    KCCL_DECODE static void multiply(float (&sums)[4], const Part& rows, uint32_t first,
                                     uint32_t second) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(rows.word[0]), "r"(rows.word[1]), "r"(rows.word[2]), "r"(rows.word[3]),
              "r"(first), "r"(second));
    }

    const uint32_t thread_;
};

}  // namespace kccl::decode
