// Implements Mma (mma.cuh) on AMD GPUs of CDNA3, by v_mfma_f32_16x16x16. The wave of 64 threads
// holds a tile in rows of four elements. Thread t has columns 4 (t / 16) to 4 (t / 16) + 3 of row t
// % 16, in 8 contiguous bytes.
#pragma once

namespace kccl::decode {

template <class T>
struct Mma {
    static constexpr uint32_t kVectors = kKcclDecodeVectorsOnAmd, kTotals = 4;

    using Floats = float __attribute__((ext_vector_type(4)));
    struct Weights {
        uint64_t words;
    };
    struct Inputs {
        uint64_t words;
    };
    struct Sums {
        float value[4];
    };

    KCCL_CONSTEXPR static uint32_t offset(uint32_t row, uint32_t column) {
        return (column / 4 * 16 + row) * 8 + column % 4 * 2;
    }

    class Lane {
      public:
        // Each number of a vector is split into a high and a low part. Column 2v of the matrix unit
        // has the high parts of vector v, column 2v + 1 its low parts.
        KCCL_DECODE Lane(uint32_t num_vectors, uint32_t stride)
            : thread_(warp().index()),
              num_vectors_(num_vectors),
              input_(thread_ % 16 / 2 * stride * sizeof(StagedFloat4) +
                     thread_ / 16 * sizeof(StagedFloat4) + thread_ % 2 * sizeof(uint64_t)) {}

        KCCL_DECODE Weights weights(const uint8_t* tile) const {
            return {mem::load_plain(reinterpret_cast<const uint64_t*>(tile) + thread_)};
        }

        KCCL_DECODE Weights streamed(const uint8_t* tile) const {
            return {mem::load_streamed(reinterpret_cast<const uint64_t*>(tile) + thread_)};
        }

        KCCL_DECODE Inputs inputs(const StagedFloat4* staged) const {
            if (thread_ % 16 / 2 >= num_vectors_) return {0};
            const auto* bytes = reinterpret_cast<const uint8_t*>(staged) + input_;
            return {mem::load_plain(reinterpret_cast<const uint64_t*>(bytes))};
        }

        KCCL_DECODE void scale(Sums& sums, const float* factors) const {
            const uint32_t vector = thread_ % 16 / 2;
            const float factor = vector < num_vectors_ ? mem::load_plain(factors + vector) : 0.0f;
            KCCL_UNROLL
            for (float& value : sums.value) value *= factor;
        }

        template <class F>
        KCCL_DECODE void totals(const Sums& sums, F f) const {
            uint32_t i = 0;
            for_each_place([&](uint32_t row, uint32_t vector) {
                const float high = sums.value[i++];
                f(row, vector, high + platform::move_lanes<platform::kLaneOddOfPair>(high));
            });
        }

        template <class F>
        KCCL_DECODE void for_each_place(F f) const {
            const bool has_high = thread_ % 2 == 0;
            KCCL_UNROLL
            for (uint32_t i = 0; i < kTotals; ++i) {
                f(has_high ? thread_ / 16 * 4 + i : kTileRows, thread_ % 16 / 2);
            }
        }

      private:
        const uint32_t thread_;
        const uint32_t num_vectors_;
        const uint32_t input_;  // where the thread's part of inputs begins, in bytes
    };

    KCCL_DECODE static void multiply(Sums& sums, const Weights& weights, const Inputs& inputs) {
        Floats total = platform::bit_cast<Floats>(sums);
        if constexpr (kIsBfloat16<T>) {
            using Words = short __attribute__((ext_vector_type(4)));
            total = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(platform::bit_cast<Words>(weights),
                                                              platform::bit_cast<Words>(inputs),
                                                              total, 0, 0, 0);
        } else {
            using Halves = _Float16 __attribute__((ext_vector_type(4)));
            total = __builtin_amdgcn_mfma_f32_16x16x16f16(platform::bit_cast<Halves>(weights),
                                                          platform::bit_cast<Halves>(inputs), total,
                                                          0, 0, 0);
        }
        sums = platform::bit_cast<Sums>(total);
    }
};

}  // namespace kccl::decode
