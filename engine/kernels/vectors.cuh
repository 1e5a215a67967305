// Gets the vector that a product multiplies. A warp polls the exchange buffer for its part of the
// vector, and stages that part: stores it in shared memory, split for the matrix unit.
#pragma once

#include "math.cuh"
#include "own_rows.cuh"

namespace kccl::decode {

// Returns float4 `index4` of a token's row of the embedding, widened to FP32.
template <class S>
KCCL_DECODE Float4 embedded(const Task& task, int32_t token, uint32_t index4) {
    return S::EmbedFormat::four(reinterpret_cast<const uint8_t*>(task.embedding),
                                uint64_t(token) * (S::kHidden / 4) + index4);
}

// Returns the number of the first float4 of the part of a vector that the warp multiplies. The last
// warps' parts may lie behind the vector's end; they have no data.
template <class M, class S>
KCCL_DECODE uint32_t first_float4(const ConsumerWarp<S>& consumer) {
    return consumer.warp_index() * M::kFloat4s;
}

// Stages float4 i of this warp's part of a column's vector: splits each number into two of type T,
// which the matrix unit multiplies, and stores them in shared memory, in each of the vector's
// copies (Matrix::kCopies). F: the product's format, if it is not M's.
template <class M, class F = typename M::Format, class S>
KCCL_DECODE void stage(ConsumerWarp<S>& consumer, uint32_t i, const Float4& four,
                       uint32_t column = 0) {
    const StagedFloat4 staged = split<typename F::Operand>(four);
    KCCL_UNROLL
    for (uint32_t copy = 0; copy < M::kCopies; ++copy) {
        const uint32_t at = copy * M::kAllSteps * kTileFloat4s + i;
        if (!M::kIsEven && at >= M::kStaged) continue;
        if constexpr (kIsPaired<S, F>) {
            constexpr uint32_t kOfPair = 2 * kTileFloat4s;
            auto* const pair =
                reinterpret_cast<PairedFloat4s*>(consumer.staged(column) + at / kOfPair * kOfPair) +
                at % kTileFloat4s;
            const uint32_t tile = at / kTileFloat4s % 2;
            mem::store_plain(pair->high + tile, joined(staged.high));
            mem::store_plain(pair->low + tile, joined(staged.low));
        } else {
            consumer.staged(column)[at] = staged;
        }
    }
}

// Returns float4 `index4` (16 bytes each) of the array at address `array`. The load is plain and
// orders nothing: the data must come from the host before the launch, or a sync or meeting must
// already have ordered the kernel's own stores before it. Also used for words, whose bits the
// caller casts back.
KCCL_DECODE Float4 load_float4(uint64_t array, uint64_t index4) {
    const auto lines = mem::load_plain(reinterpret_cast<const mem::Line*>(array) + index4);
    return platform::bit_cast<Float4>(lines);
}

// Adds up the squares of this warp's part of residual i, of which the thread has N float4s, and
// stores the sum in shared memory for inverse_rms(). Called by all threads of the warp. Residuals
// are counted over all columns.
template <uint32_t N, class S>
KCCL_DECODE void store_squares(ConsumerWarp<S>& consumer, const Float4* float4s, uint32_t i) {
    float squares = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < N; ++k) {
        for (const float value : float4s[k].value) squares += value * value;
    }
    squares = sum_of_warp(squares);
    if (leads(warp())) mem::store_plain(consumer.squares(consumer.warp_index()) + i, squares);
}

// Prefetches the norm's weights for this warp's part of the vector, because the cache may have
// dropped them since the last token step. Called one op before they are needed.
template <class M, class S>
KCCL_DECODE void prefetch_norm(ConsumerWarp<S>& consumer, uint32_t norm) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    const uint64_t first = uint64_t{norm} * (S::kHidden / 4) + first_float4<M>(consumer);
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = consumer.thread() + k * platform::kWarpSize;
        if (i < M::kFloat4s && i % (kKcclLineBytes / sizeof(Float4)) == 0) {
            mem::prefetch(reinterpret_cast<const Float4*>(consumer.task().norms) + first + i);
        }
    }
}

// Tells whether the token step uses a column. Where there is one column, nothing asks.
template <class S>
KCCL_DECODE bool is_used(const ConsumerWarp<S>& consumer, uint32_t column) {
    return S::kColumns == 1 || column < consumer.num_columns();
}

// Waits for this warp's part of each column's residual after module `module`, and stages it,
// multiplied by the weights of norm number `norm`. If `module` is negative, the residual is the
// embedding of the column's id, in column 0 `token`, and nothing is waited for. Also stores the sum
// of its squares (store_squares).
template <class M, class F = typename M::Format, class S>
KCCL_DECODE void stage_residual(ConsumerWarp<S>& consumer, int32_t module, uint32_t norm,
                                int32_t token) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    constexpr uint32_t kNum = columns_at_once<S>(kEach);
    const uint32_t first = first_float4<M>(consumer);
    Float4 weights[kEach];
    uint32_t rows[kEach], wanted = 0;
    const uint32_t base = Slots<S>::residual(module < 0 ? 0 : module, consumer.residual_index());
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = consumer.thread() + k * platform::kWarpSize;
        const bool is_there = i < M::kFloat4s && first + i < M::kColumns / 4;
        wanted |= is_there ? 1u << k : 0;
        rows[k] = is_there ? first + i : 0;
        weights[k] =
            load_float4(consumer.task().norms, uint64_t{norm} * (S::kHidden / 4) + rows[k]);
    }
    consumer.template for_columns<kNum>([&](uint32_t column) {
        const uint32_t all = consumer.template wanted_of<kEach, kNum>(wanted, column);
        Float4 float4s[kNum * kEach];
        if (module < 0) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kNum * kEach; ++k) {
                float4s[k] =
                    (all >> k & 1u) != 0
                        ? embedded<S>(consumer.task(), consumer.id_of(token, column + k / kEach),
                                      rows[k % kEach])
                        : Float4{};
            }
        } else {
            uint32_t slots[kNum * kEach];
            KCCL_UNROLL
            for (uint32_t k = 0; k < kNum * kEach; ++k) {
                slots[k] = Slots<S>::in_column(rows[k % kEach] + base, column + k / kEach);
            }
            consumer.template await<mem::Scope::kDevice>(
                slots, all, consumer.template tags<kEach>(column), float4s, 0, column == 0);
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum * kEach; ++k) {
            const uint32_t i = consumer.thread() + k % kEach * platform::kWarpSize;
            const Float4& weight = weights[k % kEach];
            Float4 scaled;
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) scaled.value[j] = float4s[k].value[j] * weight.value[j];
            if (i < M::kFloat4s && is_used(consumer, column + k / kEach)) {
                stage<M, F>(consumer, i, scaled, column + k / kEach);
            }
        }
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) {
            // Unused columns have zeros. With a branch for each, one column's sum would wait for
            // another one's.
            if (S::kColumns % kNum != 0 && column + i >= S::kColumns) break;
            store_squares<kEach>(consumer, float4s + i * kEach, (column + i) * S::kNumResiduals);
        }
    });
}

// Calls stage_residual() for a product in format F that has the columns of M. with_format() picks
// F.
template <class M, class S>
struct StageResidual {
    template <class F>
    KCCL_DECODE void run() const {
        stage_residual<M, F>(consumer, module, norm, token);
    }

    ConsumerWarp<S>& consumer;
    int32_t module;
    uint32_t norm;
    int32_t token;
};

// Returns 1 / the root of the mean square of residual i, from the sums that store_squares() has
// stored. All consumer warps must have met (ConsumerWarp::meet) since they stored them.
template <class S>
KCCL_DECODE float inverse_rms(ConsumerWarp<S>& consumer, uint32_t i = 0) {
    float squares = 0;
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        squares += mem::load_plain(consumer.squares(each) + i);
    }
    return reciprocal_root(squares * (1.0f / S::kHidden) + S::kNormEps);
}

// Returns inverse_rms() of the lane group's residual, column by column.
template <class S>
class Inverses {
  public:
    KCCL_DECODE explicit Inverses(ConsumerWarp<S>& consumer)
        : consumer_(consumer), only_(S::kColumns == 1 ? inverse_rms(consumer) : 0) {}
    KCCL_DECODE float of(uint32_t column) const {
        if constexpr (S::kColumns == 1) return only_;
        return inverse_rms(consumer_, column * S::kNumResiduals);
    }

  private:
    ConsumerWarp<S>& consumer_;
    const float only_;
};

// Waits for this warp's part of the vector of each of the lane group's lanes, in each column, and
// stages these parts. Float4 i of a lane's vector has slot slot_of(lane) + i of the exchange
// buffer. slot_of() takes the lane's number over all ranks. IS_ATTENDED: the vectors are results of
// attention (Slots::attended).
template <class M, bool IS_ATTENDED = false, class S, class SlotOf>
KCCL_DECODE void stage_lanes(ConsumerWarp<S>& consumer, SlotOf slot_of) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s * M::kLanes, platform::kWarpSize);
    constexpr uint32_t kNum = columns_at_once<S>(kEach);
    const uint32_t first = first_float4<M>(consumer);
    uint32_t rows[kEach], wanted = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t at = consumer.thread() + k * platform::kWarpSize;
        const uint32_t lane = at / M::kFloat4s, i = at % M::kFloat4s;
        const bool is_there = lane < M::kLanes && first + i < M::kColumns / 4;
        wanted |= is_there ? 1u << k : 0;
        rows[k] = is_there ? slot_of(consumer.first_lane() + lane) + first + i : 0;
    }
    consumer.template for_columns<kNum>([&](uint32_t column) {
        Float4 float4s[kNum * kEach];
        uint32_t slots[kNum * kEach];
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum * kEach; ++k) {
            slots[k] = Slots<S>::in_column(rows[k % kEach], column + k / kEach);
        }
        const auto tags = IS_ATTENDED ? consumer.template attended_tags<kEach>(column)
                                      : consumer.template tags<kEach>(column);
        consumer.template await<mem::Scope::kDevice>(
            slots, consumer.template wanted_of<kEach, kNum>(wanted, column), tags, float4s, 0,
            column == 0);
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum * kEach; ++k) {
            const uint32_t at = consumer.thread() + k % kEach * platform::kWarpSize;
            if (at < M::kFloat4s * M::kLanes && is_used(consumer, column + k / kEach)) {
                stage<M>(consumer, at, float4s[k], column + k / kEach);
            }
        }
    });
}

}  // namespace kccl::decode
