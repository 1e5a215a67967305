// mma.cuh on NVIDIA GPUs: mma.sync.m16n8k16. PTX says which thread holds which element.
//
// The unit takes columns 2q, 2q + 1, 2q + 8 and 2q + 9 of a tile from thread q of four. Which
// columns of the matrix those are does not matter as long as the vector's agree. Here they are 4q
// to 4q + 3, so that a thread needs one float4 of the vector. A thread's 16 bytes of a tile are
// contiguous.
#pragma once

namespace kccl::decode {

template <class T>
struct Mma {
    static constexpr uint32_t kVectors = kKcclDecodeVectors, kTotals = 2, kSumsLines = 8;

    struct Weights {
        uint32_t word[4];
    };
    struct Inputs {
        uint32_t word[2];
    };
    struct Sums {
        float value[4];
    };
    template <uint32_t BITS>
    struct Packed {
        uint32_t word[BITS < 4 ? 1 : BITS / 4];
    };
    // The bytes of a thread's two rows.
    template <uint32_t NUM>
    struct RowBytes {
        KCCL_DECODE void skip(uint32_t num) {
            KCCL_UNROLL
            for (auto& bytes : row) bytes >>= 8 * num;
        }
        typename RowBytesWord<NUM>::Type row[2];
    };
    // The scales of a thread's two rows. Scales of one byte stay as they are until they are used:
    // a thread holds those of up to two stages, and so needs half as many registers for them.
    template <class SCALE, bool IS_BYTE = sizeof(SCALE) == 1>
    struct Scales {
        KCCL_DECODE float operator[](uint32_t i) const { return value[i]; }
        float value[2];
    };
    template <class SCALE>
    struct Scales<SCALE, true> {
        KCCL_DECODE float operator[](uint32_t i) const {
            return widened(SCALE{static_cast<uint8_t>(both >> 8 * i)});
        }
        uint32_t both;
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
    struct alignas(8) SumsOfParts {
        float value[kParts];
    };

    KCCL_CONSTEXPR static uint32_t offset(uint32_t row, uint32_t column) {
        const uint32_t thread = row % 8 * 4 + column / 4;
        const uint32_t word = row / 8 + column % 4 / 2 * 2;
        return thread * 16 + word * 4 + column % 2 * 2;
    }

    // A thread of query_mma_cuda.cuh then gets the scores of positions 4q to 4q + 3.
    KCCL_CONSTEXPR static uint32_t key_row(uint32_t position) {
        return position / 2 % 2 * 8 + position / 4 * 2 + position % 2;
    }
    KCCL_CONSTEXPR static uint32_t position_of(uint32_t key_row) {
        return key_row % 8 / 2 * 4 + key_row / 8 * 2 + key_row % 2;
    }

    KCCL_CONSTEXPR static Place place_of(uint32_t i) {
        const uint32_t thread = i / 8;
        return {thread / 4 + i / 2 % 2 * 8, thread % 4 * 4 + i / 4 % 2 * 2 + i % 2};
    }

    // The scales of a thread's two rows are neighbours.
    KCCL_CONSTEXPR static uint32_t scale_at(uint32_t row) { return row % 8 * 2 + row / 8; }

    class Lane {
      public:
        // The lane number is kept in a register, because reading the special register is slow.
        KCCL_DECODE Lane(uint32_t num_vectors, uint32_t stride)
            : thread_(mem::forget(warp().index())),
              num_vectors_(num_vectors),
              // Column 2v of the unit is the high part of vector v, column 2v + 1 its low part. If
              // there are fewer vectors, the last one is repeated. A branch around the loads would
              // cost more.
              input_((thread_ / 8 < num_vectors ? thread_ / 8 : num_vectors - 1) * stride *
                         sizeof(StagedFloat4) +
                     thread_ % 4 * sizeof(StagedFloat4) + thread_ / 4 % 2 * sizeof(uint64_t)) {}

        KCCL_DECODE Weights weights(const uint8_t* tile) const {
            const mem::Line line =
                mem::load_plain(reinterpret_cast<const mem::Line*>(tile) + thread_);
            return {{static_cast<uint32_t>(line.word[0]), static_cast<uint32_t>(line.word[0] >> 32),
                     static_cast<uint32_t>(line.word[1]),
                     static_cast<uint32_t>(line.word[1] >> 32)}};
        }

        KCCL_DECODE Weights streamed(const uint8_t* tile) const { return weights(tile); }

        template <uint32_t BITS>
        KCCL_DECODE Packed<BITS> packed(const uint8_t* tile) const {
            if constexpr (BITS < 4) {
                return {{load_both<uint16_t>(tile, thread_)}};
            } else {
                return load_both<Packed<BITS>>(tile, thread_);
            }
        }

        template <uint32_t NUM>
        KCCL_DECODE RowBytes<NUM> row_bytes(const uint8_t* bytes) const {
            if constexpr (NUM == 8) {
                const mem::Line line =
                    mem::load_plain(reinterpret_cast<const mem::Line*>(bytes) + thread_ / 4);
                return {{line.word[0], line.word[1]}};
            } else if constexpr (NUM == 4) {
                const auto both = load_both<uint64_t>(bytes, thread_ / 4);
                return {{static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)}};
            } else if constexpr (NUM == 2) {
                const auto both = load_both<uint32_t>(bytes, thread_ / 4);
                return {{both, both >> 16}};
            } else {
                const uint32_t both = load_both<uint16_t>(bytes, thread_ / 4);
                return {{both, both >> 8}};
            }
        }

        template <class SCALE>
        KCCL_DECODE Scales<SCALE> scales(const uint8_t* scales) const {
            if constexpr (sizeof(SCALE) == 1) {
                return {load_both<uint16_t>(scales, thread_ / 4)};
            } else {
                struct Both {
                    SCALE value[2];
                };
                const auto both = load_both<Both>(scales, thread_ / 4);
                return {{widened(both.value[0]), widened(both.value[1])}};
            }
        }

        KCCL_DECODE uint32_t zeros(const uint8_t* zeros) const {
            return mem::load_plain(reinterpret_cast<const uint16_t*>(zeros) + thread_ / 4);
        }

        KCCL_DECODE Inputs inputs(const StagedFloat4* staged) const {
            const auto* bytes = reinterpret_cast<const uint8_t*>(staged) + input_;
            const uint64_t both = mem::load_plain(reinterpret_cast<const uint64_t*>(bytes));
            return {{static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)}};
        }

        KCCL_DECODE OfTwoTiles<Inputs> paired(const PairedFloat4s* staged) const {
            const auto* bytes = reinterpret_cast<const uint8_t*>(staged) + 2 * input_;
            return platform::bit_cast<OfTwoTiles<Inputs>>(
                mem::load_plain(reinterpret_cast<const mem::Line*>(bytes)));
        }

        template <class At>
        KCCL_DECODE Gather gather(At at) const {
            return {reinterpret_cast<const uint8_t*>(at(thread_ / 8) + thread_ % 4) +
                    thread_ / 4 % 2 * sizeof(uint64_t)};
        }
        KCCL_DECODE Inputs inputs(const Gather& gather, uint32_t offset) const {
            const auto* const words = reinterpret_cast<const uint64_t*>(gather.mine);
            constexpr uint32_t kOfFloat4 = sizeof(StagedFloat4) / sizeof(uint64_t);
            const uint64_t both = mem::load_plain(words + uint64_t{offset} * kOfFloat4);
            return {{static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)}};
        }

        template <class SUMS, class At>
        KCCL_DECODE SUMS load_sums(At at) const {
            const mem::Line* const from = at(thread_ % 4);
            if (from == nullptr) return {};
            return platform::bit_cast<SUMS>(mem::load_plain(from + thread_ / 4));
        }
        template <class SUMS, class At>
        KCCL_DECODE void store_sums(const SUMS& sums, At at) const {
            mem::Line* const to = at(thread_ % 4);
            if (to != nullptr)
                mem::store_plain(to + thread_ / 4, platform::bit_cast<mem::Line>(sums));
        }

        KCCL_DECODE void scale(Sums& sums, const float* factors) const {
            const uint32_t vector = thread_ % 4;
            const float factor = vector < num_vectors_ ? mem::load_plain(factors + vector) : 0.0f;
            KCCL_UNROLL
            for (float& value : sums.value) value *= factor;
        }

        KCCL_DECODE void store_parts(const Sums& sums, float* to) const {
            if (thread_ >= num_vectors_) return;
            const SumsOfParts parts = {{sums.value[0], sums.value[1]}};
            mem::store_plain(reinterpret_cast<uint64_t*>(to) + thread_,
                             platform::bit_cast<uint64_t>(parts));
        }

        template <class F>
        KCCL_DECODE void totals(const Sums& sums, F f) const {
            uint32_t i = 0;
            for_each_place([&](uint32_t row, uint32_t vector) {
                f(row, vector, sums.value[i] + sums.value[i + 1]);
                i += 2;
            });
        }

        template <class F>
        KCCL_DECODE void totals(const Scaled& scaled, F f) const {
            uint32_t i = 0;
            for_each_place([&](uint32_t row, uint32_t vector) {
                // Products with powers of two are exact.
                f(row, vector,
                  scaled.value[i] * Parts<T>::kHigh + scaled.value[i + 1] * Parts<T>::kLow);
                i += 2;
            });
        }

        template <class F>
        KCCL_DECODE void for_each_place(F f) const {
            f(thread_ / 4, thread_ % 4);
            f(thread_ / 4 + 8, thread_ % 4);
        }

      private:
        // Loads the i-th struct, of 2, 4 or 8 bytes, by one instruction.
        template <class BOTH>
        KCCL_DECODE static BOTH load_both(const uint8_t* from, uint32_t i) {
            if constexpr (sizeof(BOTH) == sizeof(uint64_t)) {
                return platform::bit_cast<BOTH>(
                    mem::load_plain(reinterpret_cast<const uint64_t*>(from) + i));
            } else if constexpr (sizeof(BOTH) == sizeof(uint32_t)) {
                return platform::bit_cast<BOTH>(
                    mem::load_plain(reinterpret_cast<const uint32_t*>(from) + i));
            } else {
                return platform::bit_cast<BOTH>(
                    mem::load_plain(reinterpret_cast<const uint16_t*>(from) + i));
            }
        }

        const uint32_t thread_;
        const uint32_t num_vectors_;
        const uint32_t input_;  // in bytes
    };
    using StreamingLane = Lane;

    KCCL_DECODE static Sums sums_of(const float* from) {
        const auto both = platform::bit_cast<SumsOfParts>(
            mem::load_plain(reinterpret_cast<const uint64_t*>(from)));
        return {{both.value[0], both.value[1], both.value[0], both.value[1]}};
    }

    KCCL_DECODE static Weights words_of(const uint64_t (&fours)[2]) {
        return {{static_cast<uint32_t>(fours[0]), static_cast<uint32_t>(fours[0] >> 32),
                 static_cast<uint32_t>(fours[1]), static_cast<uint32_t>(fours[1] >> 32)}};
    }

    template <uint32_t NUM>
    KCCL_DECODE static Scales<float> scaled(const Scales<f16>& scales, const RowBytes<NUM>& bytes,
                                            uint32_t i) {
        Scales<float> products;
        // A byte behind the upper half of 2^15 makes 2^15 plus the byte. What is subtracted is a
        // product of 9 and 11 bits, so it is exact, and so is the result.
        constexpr uint32_t kPower = 0x47000000;
        KCCL_UNROLL
        for (uint32_t k = 0; k < 2; ++k) {
            const auto word = static_cast<uint32_t>(bytes.row[k] >> (i / 4 * 32));
            const auto sum =
                platform::bit_cast<float>(__byte_perm(word, kPower, 0x7604 | (i % 4) << 4));
            products.value[k] = times_plus(sum, scales[k], -(32768.0f + 128.0f) * scales[k]);
        }
        return products;
    }

    template <class SCALES>
    KCCL_DECODE static void add_scaled(Scaled& scaled, const Sums& sums, const SCALES& scales) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            scaled.value[i] = times_plus(sums.value[i], scales[i / 2], scaled.value[i]);
        }
    }

    KCCL_DECODE static void multiply(Sums& sums, const Weights& weights, const Inputs& inputs) {
#define KCCL_DECODE_MMA(type)                                                                     \
    asm volatile(                                                                                 \
        "mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                    \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                \
        : "=f"(sums.value[0]), "=f"(sums.value[1]), "=f"(sums.value[2]), "=f"(sums.value[3])      \
        : "r"(weights.word[0]), "r"(weights.word[1]), "r"(weights.word[2]), "r"(weights.word[3]), \
          "r"(inputs.word[0]), "r"(inputs.word[1]), "f"(sums.value[0]), "f"(sums.value[1]),       \
          "f"(sums.value[2]), "f"(sums.value[3]))
        if constexpr (kIsBfloat16<T>)
            KCCL_DECODE_MMA("bf16");
        else
            KCCL_DECODE_MMA("f16");
#undef KCCL_DECODE_MMA
    }
};

}  // namespace kccl::decode
