// wide_mma.cuh on NVIDIA GPUs: wgmma, which only sm_90a has. A warp of the four holds the same
// elements of its tile and of its sums as with mma.sync. The other operand lies in shared memory,
// in pieces of 8 columns x 16 bytes.
#pragma once

namespace kccl::decode {

template <class T, uint32_t VECTORS>
class WideMma {
    using Unit = Mma<T>;

  public:
    static constexpr bool kIsThere = true;
    static constexpr uint32_t kWarps = 4;
    static constexpr uint32_t kStepBytes = VECTORS / kWideVectors * kWideGroupBytes;
    static_assert(VECTORS == 32 || VECTORS == 64 || VECTORS == 128, "the products below");

    using Weights = typename Unit::Weights;
    struct Sums {
        typename Unit::Sums of[VECTORS / kWideVectors];
    };

    KCCL_DECODE void begin() const { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

    KCCL_DECODE void multiply(Sums& sums, const Weights& weights, const uint8_t* step,
                              bool adds = true) const {
        constexpr bool kIsBf16 = kIsBfloat16<T>;
        const uint64_t at = kStrides | mem::shared_address(step) >> 4;
        const uint32_t adds_word = adds;
// The operands of the asm statement are the sums, the weights, the step, and whether it adds.
#define KCCL_WIDE_SUM(i) "+f"(sums.of[(i) / 4].value[(i) % 4])
#define KCCL_WIDE_SUMS_4(i) \
    KCCL_WIDE_SUM(i), KCCL_WIDE_SUM(i + 1), KCCL_WIDE_SUM(i + 2), KCCL_WIDE_SUM(i + 3)
#define KCCL_WIDE_SUMS_16(i) \
    KCCL_WIDE_SUMS_4(i), KCCL_WIDE_SUMS_4(i + 4), KCCL_WIDE_SUMS_4(i + 8), KCCL_WIDE_SUMS_4(i + 12)
#define KCCL_WIDE_SUMS_32(i) KCCL_WIDE_SUMS_16(i), KCCL_WIDE_SUMS_16(i + 16)
#define KCCL_WIDE_SUMS_64(i) KCCL_WIDE_SUMS_32(i), KCCL_WIDE_SUMS_32(i + 32)
#define KCCL_WIDE_SUMS_128(i) KCCL_WIDE_SUMS_64(i), KCCL_WIDE_SUMS_64(i + 64)
#define KCCL_WIDE_TEN(tens)                                                                      \
    "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens \
    "7, %" tens "8, %" tens "9, "
#define KCCL_WIDE_30 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " KCCL_WIDE_TEN("1") KCCL_WIDE_TEN("2")
#define KCCL_WIDE_60 KCCL_WIDE_30 KCCL_WIDE_TEN("3") KCCL_WIDE_TEN("4") KCCL_WIDE_TEN("5")
#define KCCL_WIDE_120                                                                        \
    KCCL_WIDE_60 KCCL_WIDE_TEN("6") KCCL_WIDE_TEN("7") KCCL_WIDE_TEN("8") KCCL_WIDE_TEN("9") \
        KCCL_WIDE_TEN("10") KCCL_WIDE_TEN("11")
#define KCCL_WIDE_MMA(type, columns, sums_text, weights_text, step_text, adds_text, sums_list) \
    asm volatile("{ .reg .pred adds; setp.ne.u32 adds, " adds_text                             \
                 ", 0; "                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type          \
                 " {" sums_text "}, {" weights_text "}, " step_text ", adds, 1, 1, 0; }"       \
                 : sums_list                                                                   \
                 : "r"(weights.word[0]), "r"(weights.word[1]), "r"(weights.word[2]),           \
                   "r"(weights.word[3]), "l"(at), "r"(adds_word))
#define KCCL_WIDE_MMA_32(type)                                                             \
    KCCL_WIDE_MMA(type, "64", KCCL_WIDE_30 "%30, %31", "%32, %33, %34, %35", "%36", "%37", \
                  KCCL_WIDE_SUMS_32(0))
#define KCCL_WIDE_MMA_64(type)                                                                 \
    KCCL_WIDE_MMA(type, "128", KCCL_WIDE_60 "%60, %61, %62, %63", "%64, %65, %66, %67", "%68", \
                  "%69", KCCL_WIDE_SUMS_64(0))
#define KCCL_WIDE_MMA_128(type)                                                                \
    KCCL_WIDE_MMA(type, "256", KCCL_WIDE_120 "%120, %121, %122, %123, %124, %125, %126, %127", \
                  "%128, %129, %130, %131", "%132", "%133", KCCL_WIDE_SUMS_128(0))
        if constexpr (VECTORS == 32 && kIsBf16) KCCL_WIDE_MMA_32("bf16");
        if constexpr (VECTORS == 32 && !kIsBf16) KCCL_WIDE_MMA_32("f16");
        if constexpr (VECTORS == 64 && kIsBf16) KCCL_WIDE_MMA_64("bf16");
        if constexpr (VECTORS == 64 && !kIsBf16) KCCL_WIDE_MMA_64("f16");
        if constexpr (VECTORS == 128 && kIsBf16) KCCL_WIDE_MMA_128("bf16");
        if constexpr (VECTORS == 128 && !kIsBf16) KCCL_WIDE_MMA_128("f16");
#undef KCCL_WIDE_SUM
#undef KCCL_WIDE_SUMS_4
#undef KCCL_WIDE_SUMS_16
#undef KCCL_WIDE_SUMS_32
#undef KCCL_WIDE_SUMS_64
#undef KCCL_WIDE_SUMS_128
#undef KCCL_WIDE_TEN
#undef KCCL_WIDE_30
#undef KCCL_WIDE_60
#undef KCCL_WIDE_120
#undef KCCL_WIDE_MMA
#undef KCCL_WIDE_MMA_32
#undef KCCL_WIDE_MMA_64
#undef KCCL_WIDE_MMA_128
    }

    KCCL_DECODE void commit() const {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }

    template <uint32_t PENDING>
    KCCL_DECODE void wait() const {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    }
    // Without the second statement the compiler might read sums before the wait.
    KCCL_DECODE void wait(Sums& sums) const {
        wait<0>();
        KCCL_UNROLL
        for (uint32_t i = 0; i < VECTORS; ++i) asm volatile("" : "+f"(sums.of[i / 4].value[i % 4]));
    }

  private:
    // How far neighbouring pieces lie apart: along the columns of the tile, and along the vectors.
    static constexpr uint64_t kPieceBytes = kWideGroupBytes / 2;
    static constexpr uint64_t kStrides = kPieceBytes / 16 << 16 | kWideGroupBytes / 16ull << 32;
};

}  // namespace kccl::decode
