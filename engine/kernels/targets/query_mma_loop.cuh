// query_mma.cuh without a matrix unit, for the simulator with warps of 32. A thread computes its
// own sums: of two queries, with four rows of a tile.
#pragma once

namespace kccl::decode {

struct QueryMma {
    static constexpr bool kIsThere = platform::kWarpSize == 32;
    static constexpr uint32_t kQueries = 16, kEach = 2, kColumns = 4;

    struct Tile {
        uint64_t index4[kColumns][kTileFloat4s];  // four elements each
    };
    // The two parts of a vector, added up, are one FP32 value.
    struct Rows {
        float value[kEach][kTileColumns];
    };
    struct Sums {
        float value[kEach][kColumns];
    };

    KCCL_DECODE QueryMma() : thread_(warp().index()) {}

    KCCL_DECODE uint32_t query(uint32_t i) const { return thread_ / 4 + 8 * i; }
    KCCL_DECODE uint32_t quad() const { return thread_ % 4; }
    KCCL_DECODE uint32_t element(uint32_t k) const { return quad() * kColumns + k; }

    KCCL_DECODE Tile tile(const uint8_t* from) const {
        Tile tile;
        for (uint32_t k = 0; k < kColumns; ++k) {
            const auto* const row =
                reinterpret_cast<const uint64_t*>(from + Mma<f16>::offset(element(k), 0));
            for (uint32_t i = 0; i < kTileFloat4s; ++i) {
                tile.index4[k][i] = mem::load_plain(row + i);
            }
        }
        return tile;
    }
    KCCL_DECODE Rows load(const StagedFloat4* const (&at)[kEach], uint32_t i) const {
        Rows rows;
        for (uint32_t j = 0; j < kEach; ++j) {
            for (uint32_t index4 = 0; index4 < kTileFloat4s; ++index4) {
                const auto staged = mem::load_plain(at[j] + i * kTileFloat4s + index4);
                widen(staged, rows.value[j] + 4 * index4);
            }
        }
        return rows;
    }
    KCCL_DECODE Rows rows(const StagedFloat4 (&staged)[kEach]) const {
        Rows rows;
        for (uint32_t j = 0; j < kEach; ++j) {
            for (uint32_t index4 = 0; index4 < kTileFloat4s; ++index4) {
                const uint32_t from = thread_ / kTileFloat4s * kTileFloat4s + index4;
                widen(platform::shuffle(staged[j], from), rows.value[j] + 4 * index4);
            }
        }
        return rows;
    }

    KCCL_DECODE static void multiply(Sums& sums, const Rows& rows, const Tile& tile) {
        for (uint32_t k = 0; k < kColumns; ++k) {
            float of_row[kTileColumns];
            for (uint32_t i = 0; i < kTileFloat4s; ++i) {
                Mma<f16>::widen(tile.index4[k][i], of_row + 4 * i);
            }
            for (uint32_t j = 0; j < kEach; ++j) {
                for (uint32_t i = 0; i < kTileColumns; ++i) {
                    sums.value[j][k] += of_row[i] * rows.value[j][i];
                }
            }
        }
    }
    KCCL_DECODE static void scale(Sums& sums, const float (&factors)[kEach]) {
        for (uint32_t j = 0; j < kEach; ++j) {
            for (float& value : sums.value[j]) value *= factors[j];
        }
    }
    KCCL_DECODE static void totals(const Sums& sums, Float4 (&fours)[kEach]) {
        for (uint32_t j = 0; j < kEach; ++j) {
            for (uint32_t k = 0; k < kColumns; ++k) fours[j].value[k] = sums.value[j][k];
        }
    }

  private:
    KCCL_DECODE static void widen(const StagedFloat4& staged, float* values) {
        float high[4], low[4];
        Mma<f16>::widen(platform::bit_cast<uint64_t>(staged.high), high);
        Mma<f16>::widen(platform::bit_cast<uint64_t>(staged.low), low);
        for (uint32_t i = 0; i < 4; ++i) {
            values[i] = Parts<f16>::kHigh * high[i] + Parts<f16>::kLow * low[i];
        }
    }

    const uint32_t thread_;
};

}  // namespace kccl::decode
