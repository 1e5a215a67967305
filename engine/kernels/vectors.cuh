// Gets the vector that a product multiplies. A warp polls the exchange buffer for its part of the
// vector, and stages that part: stores it in shared memory, split for the matrix unit.
#pragma once

#include "math.cuh"
#include "product.cuh"

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

// Stages float4 i of this warp's part of a vector: splits each number into two of type T, which the
// matrix unit multiplies, and stores them in shared memory, in each of the vector's copies
// (Matrix::kCopies).
template <class M, class T = typename M::Format::Operand, class S>
KCCL_DECODE void stage(ConsumerWarp<S>& consumer, uint32_t i, const Float4& four) {
    const StagedFloat4 staged = split<T>(four);
    KCCL_UNROLL
    for (uint32_t copy = 0; copy < M::kCopies; ++copy) {
        const uint32_t at = copy * M::kAllSteps * kTileFloat4s + i;
        if (M::kIsEven || at < M::kStaged) consumer.staged()[at] = staged;
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

// Adds up the squares of this warp's part of residual i, and stores the sum in shared memory for
// inverse_rms(). Called by all threads of the warp.
template <class S, uint32_t N>
KCCL_DECODE void store_squares(ConsumerWarp<S>& consumer, const Float4 (&float4s)[N], uint32_t i) {
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

// Waits for this warp's part of the residual after module `module`, and stages it, multiplied by
// the weights of norm number `norm`. If `module` is negative, the residual is the embedding of the
// id `token`, and nothing is waited for. Also stores the sum of its squares (store_squares).
template <class M, class T = typename M::Format::Operand, class S>
KCCL_DECODE void stage_residual(ConsumerWarp<S>& consumer, int32_t module, uint32_t norm,
                                int32_t token) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    const uint32_t first = first_float4<M>(consumer);
    Float4 weights[kEach], float4s[kEach];
    uint32_t slots[kEach], wanted = 0;
    const uint32_t base = Slots<S>::residual(module < 0 ? 0 : module, consumer.residual_index());
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = consumer.thread() + k * platform::kWarpSize;
        const bool is_there = i < M::kFloat4s && first + i < M::kColumns / 4;
        wanted |= is_there ? 1u << k : 0;
        slots[k] = is_there ? first + i : 0;
        weights[k] =
            load_float4(consumer.task().norms, uint64_t{norm} * (S::kHidden / 4) + slots[k]);
    }
    if (module < 0) {
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            float4s[k] =
                (wanted >> k & 1u) != 0 ? embedded<S>(consumer.task(), token, slots[k]) : Float4{};
        }
    } else {
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) slots[k] += base;
        consumer.template await<mem::Scope::kDevice>(slots, wanted, tag_of(consumer.token_step()),
                                                     float4s);
    }
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = consumer.thread() + k * platform::kWarpSize;
        Float4 scaled;
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) scaled.value[j] = float4s[k].value[j] * weights[k].value[j];
        if (i < M::kFloat4s) stage<M, T>(consumer, i, scaled);
    }
    store_squares(consumer, float4s, 0);
}

// Calls stage_residual() for a product in format F that has the columns of M. with_format() picks
// F.
template <class M, class S>
struct StageResidual {
    template <class F>
    KCCL_DECODE void run() const {
        stage_residual<M, typename F::Operand>(consumer, module, norm, token);
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

// Waits for this warp's part of the vector of each of the lane group's lanes, and stages these
// parts. Float4 i of a lane's vector has slot slot_of(lane) + i of the exchange buffer. slot_of()
// takes the lane's number over all ranks.
template <class M, class S, class SlotOf>
KCCL_DECODE void stage_lanes(ConsumerWarp<S>& consumer, SlotOf slot_of) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s * M::kLanes, platform::kWarpSize);
    const uint32_t first = first_float4<M>(consumer);
    Float4 float4s[kEach];
    uint32_t slots[kEach], wanted = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t at = consumer.thread() + k * platform::kWarpSize;
        const uint32_t lane = at / M::kFloat4s, i = at % M::kFloat4s;
        const bool is_there = lane < M::kLanes && first + i < M::kColumns / 4;
        wanted |= is_there ? 1u << k : 0;
        slots[k] = is_there ? slot_of(consumer.first_lane() + lane) + first + i : 0;
    }
    consumer.template await<mem::Scope::kDevice>(slots, wanted, tag_of(consumer.token_step()),
                                                 float4s);
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t at = consumer.thread() + k * platform::kWarpSize;
        if (at < M::kFloat4s * M::kLanes) stage<M>(consumer, at, float4s[k]);
    }
}

}  // namespace kccl::decode
