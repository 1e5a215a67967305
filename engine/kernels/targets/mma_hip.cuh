// Implements Mma (mma.cuh) on AMD GPUs of CDNA3, by v_mfma_f32_16x16x16. The wave of 64 threads
// holds a tile in rows of four elements. Thread t has columns 4 (t / 16) to 4 (t / 16) + 3 of row t
// % 16, in 8 contiguous bytes.
#pragma once

namespace kccl::decode {

// An unsigned integer of 1, 2, 4 or 8 bytes.
template <uint32_t NUM>
struct BytesOf {
    using Type = typename RowBytesWord<NUM>::Type;
};
template <>
struct BytesOf<1> {
    using Type = uint8_t;
};
template <>
struct BytesOf<2> {
    using Type = uint16_t;
};

template <class T>
struct Mma {
    static constexpr uint32_t kVectors = kKcclDecodeVectorsOnAmd, kTotals = 4, kSumsLines = 8;

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
    // Loaded words stay as they are until they are multiplied, so that nothing waits for them
    // before. Two threads share eight numbers of 4 or 2 bits. Those of the second one lie behind
    // the first one's in each half (bit_of_nibble, bit_of_upper).
    template <uint32_t BITS, bool IS_SHARED = BITS != 8>
    struct Packed {
        uint32_t word[1];
    };
    template <uint32_t BITS>
    struct Packed<BITS, true> {
        struct Shared {
            KCCL_DECODE uint32_t operator[](uint32_t) const {
                return eight >> 2 * BITS * (warp().index() % 2);
            }
            uint32_t eight;
        } word;
    };
    // The bytes of the four rows whose sums a thread has.
    template <uint32_t NUM>
    struct RowBytes {
        KCCL_DECODE void skip(uint32_t num) {
            KCCL_UNROLL
            for (auto& bytes : row) bytes >>= 8 * num;
        }
        typename RowBytesWord<NUM>::Type row[4];
    };
    // The scales of these rows, of 1, 2 or 4 bytes, as they are stored.
    template <class SCALE, uint32_t BYTES = sizeof(SCALE)>
    struct Scales {
        using Bits = typename BytesOf<BYTES>::Type;
        KCCL_DECODE float operator[](uint32_t i) const {
            return widened(SCALE{static_cast<Bits>(four >> 8 * BYTES * i)});
        }
        typename BytesOf<4 * BYTES>::Type four;
    };
    template <class SCALE>
    struct Scales<SCALE, sizeof(float)> {
        KCCL_DECODE float operator[](uint32_t i) const { return value[i]; }
        float value[4];
    };
    struct Scaled {
        float value[4];
    };

    // Where this thread's part of its vector is.
    struct Gather {
        KCCL_DECODE Gather behind(uint32_t offset) const {
            return {mine + uint64_t{offset} * sizeof(StagedFloat4)};
        }
        const uint8_t* mine;
    };

    // The sums of a vector's high and low parts.
    static constexpr uint32_t kParts = 2;

    KCCL_CONSTEXPR static uint32_t offset(uint32_t row, uint32_t column) {
        return (column / 4 * 16 + row) * 8 + column % 4 * 2;
    }

    KCCL_CONSTEXPR static uint32_t key_row(uint32_t position) { return position; }
    KCCL_CONSTEXPR static uint32_t position_of(uint32_t key_row) { return key_row; }

    KCCL_CONSTEXPR static Place place_of(uint32_t i) { return {i / 4 % 16, i / 64 * 4 + i % 4}; }

    KCCL_CONSTEXPR static uint32_t scale_at(uint32_t row) { return row; }

    // STREAMS: whether weights and their scales are read once, from global memory.
    template <bool STREAMS>
    class LaneOf {
      public:
        // Each number of a vector is split into a high and a low part. Column 2v of the matrix unit
        // has the high parts of vector v, column 2v + 1 its low parts.
        KCCL_DECODE LaneOf(uint32_t num_vectors, uint32_t stride)
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

        template <uint32_t BITS>
        KCCL_DECODE Packed<BITS> packed(const uint8_t* tile) const {
            using Word = typename BytesOf<BITS == 2 ? 2 : 4>::Type;
            const auto* const words = reinterpret_cast<const Word*>(tile);
            if constexpr (BITS == 8) return {{load(words + thread_)}};
            return {{load(words + thread_ / 2)}};
        }

        template <uint32_t NUM>
        KCCL_DECODE RowBytes<NUM> row_bytes(const uint8_t* bytes) const {
            RowBytes<NUM> found;
            KCCL_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const auto* const all = reinterpret_cast<const typename BytesOf<NUM>::Type*>(bytes);
                found.row[i] = load(all + first_row() + i);
            }
            return found;
        }

        template <class SCALE>
        KCCL_DECODE Scales<SCALE> scales(const uint8_t* scales) const {
            if constexpr (sizeof(SCALE) < sizeof(float)) {
                using Four = typename BytesOf<4 * sizeof(SCALE)>::Type;
                return {load(reinterpret_cast<const Four*>(scales) + thread_ / 16)};
            } else {
                Scales<SCALE> found;
                KCCL_UNROLL
                for (uint32_t i = 0; i < 4; ++i) {
                    const auto* const all = reinterpret_cast<const SCALE*>(scales);
                    found.value[i] = load(all + first_row() + i);
                }
                return found;
            }
        }

        KCCL_DECODE uint32_t zeros(const uint8_t* zeros) const {
            return load(zeros + thread_ % 16) * 0x101u;
        }

        KCCL_DECODE Inputs inputs(const StagedFloat4* staged) const {
            if (thread_ % 16 / 2 >= num_vectors_) return {0};
            const auto* bytes = reinterpret_cast<const uint8_t*>(staged) + input_;
            return {mem::load_plain(reinterpret_cast<const uint64_t*>(bytes))};
        }

        template <class At>
        KCCL_DECODE Gather gather(At at) const {
            return {reinterpret_cast<const uint8_t*>(at(thread_ % 16 / 2) + thread_ / 16) +
                    thread_ % 2 * sizeof(uint64_t)};
        }
        KCCL_DECODE Inputs inputs(const Gather& gather, uint32_t offset) const {
            const auto* const words = reinterpret_cast<const uint64_t*>(gather.mine);
            constexpr uint32_t kOfFloat4 = sizeof(StagedFloat4) / sizeof(uint64_t);
            return {mem::load_plain(words + uint64_t{offset} * kOfFloat4)};
        }

        template <class SUMS, class At>
        KCCL_DECODE SUMS load_sums(At at) const {
            const mem::Line* const from = at(thread_ % 16 / 2);
            if (from == nullptr) return {};
            return platform::bit_cast<SUMS>(mem::load_plain(from + line()));
        }
        template <class SUMS, class At>
        KCCL_DECODE void store_sums(const SUMS& sums, At at) const {
            mem::Line* const to = at(thread_ % 16 / 2);
            if (to != nullptr) mem::store_plain(to + line(), platform::bit_cast<mem::Line>(sums));
        }

        KCCL_DECODE void scale(Sums& sums, const float* factors) const {
            const uint32_t vector = thread_ % 16 / 2;
            const float factor = vector < num_vectors_ ? mem::load_plain(factors + vector) : 0.0f;
            KCCL_UNROLL
            for (float& value : sums.value) value *= factor;
        }

        KCCL_DECODE void store_parts(const Sums& sums, float* to) const {
            if (thread_ < kParts * num_vectors_) mem::store_plain(to + thread_, sums.value[0]);
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
        KCCL_DECODE void totals(const Scaled& scaled, F f) const {
            uint32_t i = 0;
            for_each_place([&](uint32_t row, uint32_t vector) {
                const float high = scaled.value[i++];
                const float low = platform::move_lanes<platform::kLaneOddOfPair>(high);
                // Products with powers of two are exact.
                f(row, vector, high * Parts<T>::kHigh + low * Parts<T>::kLow);
            });
        }

        template <class F>
        KCCL_DECODE void for_each_place(F f) const {
            const bool has_high = thread_ % 2 == 0;
            KCCL_UNROLL
            for (uint32_t i = 0; i < kTotals; ++i) {
                f(has_high ? first_row() + i : kTileRows, thread_ % 16 / 2);
            }
        }

      private:
        template <class W>
        KCCL_DECODE static W load(const W* from) {
            if constexpr (STREAMS) return mem::load_streamed(from);
            return mem::load_plain(from);
        }

        // The first of the four rows whose sums the thread has.
        KCCL_DECODE uint32_t first_row() const { return thread_ / 16 * 4; }

        // The line of a vector's sums that this thread has.
        KCCL_DECODE uint32_t line() const { return thread_ % 2 * 4 + thread_ / 16; }

        const uint32_t thread_;
        const uint32_t num_vectors_;
        const uint32_t input_;  // where the thread's part of inputs begins, in bytes
    };
    using Lane = LaneOf<false>;
    using StreamingLane = LaneOf<true>;

    KCCL_DECODE static Sums sums_of(const float* from) {
        const float part = mem::load_plain(from + warp().index() % kParts);
        return {{part, part, part, part}};
    }

    // Takes the first four numbers of a word: those are the thread's.
    template <uint32_t NUM>
    KCCL_DECODE static Weights words_of(const uint64_t (&fours)[NUM]) {
        return {fours[0]};
    }

    template <uint32_t NUM>
    KCCL_DECODE static Scales<float> scaled(const Scales<f16>& scales, const RowBytes<NUM>& bytes,
                                            uint32_t i) {
        Scales<float> products;
        KCCL_UNROLL
        for (uint32_t k = 0; k < 4; ++k) {
            const auto byte = static_cast<uint32_t>(bytes.row[k] >> 8 * i) & 0xff;
            products.value[k] = scales[k] * byte_less_128(byte);
        }
        return products;
    }

    template <class SCALES>
    KCCL_DECODE static void add_scaled(Scaled& scaled, const Sums& sums, const SCALES& scales) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            scaled.value[i] = times_plus(sums.value[i], scales[i], scaled.value[i]);
        }
    }

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
