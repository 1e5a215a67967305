// mma.cuh without a matrix unit, for the simulator. Tiles are row-major, and thread r < 16
// multiplies row r.
#pragma once

namespace kccl::decode {

template <class T>
struct Mma {
    using Part = typename Parts<T>::Type;
    static constexpr uint32_t kVectors = kKcclDecodeVectors, kTotals = kVectors, kParts = 1,
                              kSumsLines = kTileRows * sizeof(float) / sizeof(mem::Line);

    struct Weights {
        uint64_t index4[kTileFloat4s];  // four elements each
    };
    // All threads have all inputs. The two parts of a vector, added up, are one FP32 value.
    struct Inputs {
        float value[kVectors][kTileColumns];
    };
    struct Sums {
        float value[kVectors];
    };
    template <uint32_t BITS>
    struct Packed {
        uint32_t word[kTileColumns * BITS / 32];
    };
    template <class>
    struct Scales {
        float value;
    };
    template <uint32_t NUM>
    struct RowBytes {
        KCCL_DECODE void skip(uint32_t num) { row >>= 8 * num; }
        typename RowBytesWord<NUM>::Type row;
    };
    struct Scaled {
        float value[kVectors];
    };
    struct Gather {
        KCCL_DECODE Gather behind(uint32_t offset) const {
            Gather gather = *this;
            for (const StagedFloat4*& each : gather.of) each += offset;
            return gather;
        }
        const StagedFloat4* of[kVectors];
    };

    KCCL_CONSTEXPR static uint32_t offset(uint32_t row, uint32_t column) {
        return (row * kTileColumns + column) * 2;
    }

    KCCL_CONSTEXPR static uint32_t key_row(uint32_t position) { return position; }
    KCCL_CONSTEXPR static uint32_t position_of(uint32_t key_row) { return key_row; }

    KCCL_CONSTEXPR static Place place_of(uint32_t i) {
        return {i / kTileColumns, i % kTileColumns};
    }

    KCCL_CONSTEXPR static uint32_t scale_at(uint32_t row) { return row; }

    class Lane {
      public:
        KCCL_DECODE Lane(uint32_t num_vectors, uint32_t stride)
            : row_(warp().index() < kTileRows ? warp().index() : kTileRows),
              num_vectors_(num_vectors),
              stride_(stride) {}

        KCCL_DECODE Weights weights(const uint8_t* tile) const {
            Weights weights = {};
            if (row_ == kTileRows) return weights;
            const auto* row = reinterpret_cast<const uint64_t*>(tile + offset(row_, 0));
            for (uint32_t index4 = 0; index4 < kTileFloat4s; ++index4) {
                weights.index4[index4] = mem::load_plain(row + index4);
            }
            return weights;
        }

        KCCL_DECODE Weights streamed(const uint8_t* tile) const { return weights(tile); }

        template <uint32_t BITS>
        KCCL_DECODE Packed<BITS> packed(const uint8_t* tile) const {
            Packed<BITS> packed = {};
            if (row_ == kTileRows) return packed;
            const auto* row = reinterpret_cast<const uint32_t*>(tile + row_ * sizeof(packed));
            for (uint32_t& word : packed.word) word = mem::load_plain(row++);
            return packed;
        }

        template <class SCALE>
        KCCL_DECODE Scales<SCALE> scales(const uint8_t* scales) const {
            if (row_ == kTileRows) return {0};
            return {widened(mem::load_plain(reinterpret_cast<const SCALE*>(scales) + row_))};
        }

        template <uint32_t NUM>
        KCCL_DECODE RowBytes<NUM> row_bytes(const uint8_t* bytes) const {
            RowBytes<NUM> found = {};
            for (uint32_t i = 0; i < NUM && row_ < kTileRows; ++i) {
                const typename RowBytesWord<NUM>::Type byte =
                    mem::load_plain(bytes + row_ * NUM + i);
                found.row |= byte << 8 * i;
            }
            return found;
        }

        KCCL_DECODE uint32_t zeros(const uint8_t* zeros) const {
            return row_ == kTileRows ? 0 : mem::load_plain(zeros + row_) * 0x101;
        }

        KCCL_DECODE Inputs inputs(const StagedFloat4* staged) const {
            Inputs inputs = {};
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                load(staged + vector * stride_, inputs.value[vector]);
            }
            return inputs;
        }

        KCCL_DECODE OfTwoTiles<Inputs> paired(const PairedFloat4s* staged) const {
            OfTwoTiles<Inputs> inputs = {};
            for (uint32_t i = 0; i < 2 * kTileFloat4s; ++i) {
                const PairedFloat4s* const mine = staged + i % kTileFloat4s;
                const uint32_t tile = i / kTileFloat4s;
                join(mem::load_plain(mine->high + tile), mem::load_plain(mine->low + tile),
                     inputs.tile[tile].value[0] + i % kTileFloat4s * 4);
            }
            return inputs;
        }

        template <class At>
        KCCL_DECODE Gather gather(At at) const {
            Gather gather = {};
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                gather.of[vector] = at(vector);
            }
            return gather;
        }
        KCCL_DECODE Inputs inputs(const Gather& gather, uint32_t offset) const {
            Inputs inputs = {};
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                load(gather.of[vector] + offset, inputs.value[vector]);
            }
            return inputs;
        }

        template <class SUMS, class At>
        KCCL_DECODE SUMS load_sums(At at) const {
            SUMS sums = {};
            for (uint32_t vector = 0; vector < num_vectors_ && row_ < kTileRows; ++vector) {
                const mem::Line* const from = at(vector);
                if (from == nullptr) continue;
                sums.value[vector] = mem::load_plain(reinterpret_cast<const float*>(from) + row_);
            }
            return sums;
        }
        template <class SUMS, class At>
        KCCL_DECODE void store_sums(const SUMS& sums, At at) const {
            for (uint32_t vector = 0; vector < num_vectors_ && row_ < kTileRows; ++vector) {
                mem::Line* const to = at(vector);
                if (to == nullptr) continue;
                mem::store_plain(reinterpret_cast<float*>(to) + row_, sums.value[vector]);
            }
        }

        KCCL_DECODE void scale(Sums& sums, const float* factors) const {
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                sums.value[vector] *= mem::load_plain(factors + vector);
            }
        }

        KCCL_DECODE void store_parts(const Sums& sums, float* to) const {
            for (uint32_t i = 0; i < num_vectors_ && row_ == 0; ++i) {
                mem::store_plain(to + i, sums.value[i]);
            }
        }

        template <class F>
        KCCL_DECODE void totals(const Sums& sums, F f) const {
            for_each_place(
                [&](uint32_t row, uint32_t vector) { f(row, vector, sums.value[vector]); });
        }

        template <class F>
        KCCL_DECODE void totals(const Scaled& scaled, F f) const {
            for_each_place(
                [&](uint32_t row, uint32_t vector) { f(row, vector, scaled.value[vector]); });
        }

        template <class F>
        KCCL_DECODE void for_each_place(F f) const {
            for (uint32_t vector = 0; vector < kVectors; ++vector) f(row_, vector);
        }

      private:
        // Loads 16 elements of a vector.
        KCCL_DECODE static void load(const StagedFloat4* staged, float (&values)[kTileColumns]) {
            for (uint32_t index4 = 0; index4 < kTileFloat4s; ++index4) {
                const StagedFloat4* mine = staged + index4;
                join(mem::load_plain(reinterpret_cast<const uint64_t*>(mine->high)),
                     mem::load_plain(reinterpret_cast<const uint64_t*>(mine->low)),
                     values + 4 * index4);
            }
        }
        KCCL_DECODE static void join(uint64_t high, uint64_t low, float* values) {
            float highs[4], lows[4];
            widen(high, highs);
            widen(low, lows);
            for (uint32_t i = 0; i < 4; ++i) {
                values[i] = Parts<T>::kHigh * highs[i] + Parts<T>::kLow * lows[i];
            }
        }

        const uint32_t row_;
        const uint32_t num_vectors_;
        const uint32_t stride_;
    };
    using StreamingLane = Lane;

    KCCL_DECODE static Sums sums_of(const float* from) {
        Sums sums;
        for (float& value : sums.value) value = mem::load_plain(from);
        return sums;
    }

    KCCL_DECODE static Weights words_of(const uint64_t (&fours)[kTileFloat4s]) {
        Weights weights;
        for (uint32_t i = 0; i < kTileFloat4s; ++i) weights.index4[i] = fours[i];
        return weights;
    }

    template <uint32_t NUM>
    KCCL_DECODE static Scales<float> scaled(const Scales<f16>& scales, const RowBytes<NUM>& bytes,
                                            uint32_t i) {
        return {scales.value * byte_less_128(static_cast<uint32_t>(bytes.row >> 8 * i) & 0xff)};
    }

    template <class SCALES>
    KCCL_DECODE static void add_scaled(Scaled& scaled, const Sums& sums, const SCALES& scales) {
        for (uint32_t vector = 0; vector < kVectors; ++vector) {
            scaled.value[vector] =
                times_plus(sums.value[vector], scales.value, scaled.value[vector]);
        }
    }

    KCCL_DECODE static void widen(uint64_t four, float* out) {
        for (uint32_t i = 0; i < 4; ++i) {
            out[i] = Element<Part>::widen(Part{static_cast<uint16_t>(four >> 16 * i)});
        }
    }

    KCCL_DECODE static void multiply(Sums& sums, const Weights& weights, const Inputs& inputs) {
        float of_row[kTileColumns];
        for (uint32_t index4 = 0; index4 < kTileFloat4s; ++index4) {
            widen(weights.index4[index4], of_row + 4 * index4);
        }
        for (uint32_t vector = 0; vector < kVectors; ++vector) {
            for (uint32_t i = 0; i < kTileColumns; ++i) {
                sums.value[vector] += of_row[i] * inputs.value[vector][i];
            }
        }
    }
};

}  // namespace kccl::decode
