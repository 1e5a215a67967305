// RMSNorm of rows, whose bits depend on the row only: not on the number of threads, blocks or
// ranks, nor on the target.
//
//     hidden = x + residual                                    added in float, rounded to the type
//     out = hidden / sqrt(mean(hidden * hidden) + eps) * weight    computed in float, rounded once
//
// The order of the sum: a row is cut into pieces of 8 KiB. The squares of a piece are the leaves of
// a binary tree. It adds neighbours, 0 and 1, 2 and 3, then pairs of neighbours, and so on. Leaves
// behind the row's end are 0. The sums of the pieces are added in order.
//
// On a GPU a thread takes payloads, the threads of a warp make the tree of 32 neighbouring
// payloads, and each warp makes the tree of these. On a CPU the leaves are an array.
#pragma once

#include "reduce.cuh"

namespace kccl {

constexpr uint32_t kPieceBytes = 8192;
constexpr uint32_t kPiecePayloads = kPieceBytes / kPayloadBytes;
constexpr uint32_t kGroupPayloads = 32;  // the threads of the smallest warp
constexpr uint32_t kGroups = kPiecePayloads / kGroupPayloads;
constexpr float kMostE4m3 = 448;  // a larger result becomes this

// The arrays of a call: rows of `width` elements, one behind the other.
template <class T>
struct NormedRows {
    KCCL_DEVICE explicit NormedRows(const Call& call)
        : in(input_of<T>(call)),
          residual(reinterpret_cast<T*>(call.residual)),
          weight(reinterpret_cast<const T*>(call.weight)),
          fp8_scale(reinterpret_cast<const float*>(call.fp8_scale)),
          out(reinterpret_cast<void*>(call.output)),
          count(call.count),
          width(call.width),
          eps(platform::bit_cast<float>(call.eps)) {}

    KCCL_DEVICE bool has(uint64_t row) const { return row * width < count; }

    const T* in;
    T* residual;  // null: none
    const T* weight;
    const float* fp8_scale;  // null: the result is of type T
    void* out;
    uint64_t count;  // elements of all rows; a division would delay the first push
    uint32_t width;
    float eps;
};

// What the elements of a row are multiplied by, if `total` is the sum of their squares.
KCCL_DEVICE float inverse_rms(float total, uint32_t width, float eps) {
    return 1.0f / platform::square_root(total / static_cast<float>(width) + eps);
}

// An element of the result, not rounded yet.
template <class T>
KCCL_DEVICE float normalised(T hidden, float inverse, T weight) {
    return Element<T>::widen(hidden) * inverse * Element<T>::widen(weight);
}

// Rounds it to float8_e4m3fn. NaN stays NaN.
KCCL_DEVICE f8e4m3 to_fp8(float value, float scale) {
    value = value / scale;
    if (value > kMostE4m3) value = kMostE4m3;
    if (value < -kMostE4m3) value = -kMostE4m3;
    return Element<f8e4m3>::narrow(value);
}

// ---- On a CPU --------------------------------------------------------------------------------

// The sum of the squares of one piece, `count` elements.
template <class T>
KCCL_DEVICE float piece_on_cpu(const T* hidden, uint32_t count) {
    float leaves[kPieceBytes / sizeof(T)];
    KCCL_INDEPENDENT
    for (uint32_t i = 0; i < count; ++i) {
        const float value = Element<T>::widen(mem::load_plain(hidden + i));
        leaves[i] = value * value;  // no sum follows that it could be fused with
    }
    uint32_t num = 1;
    while (num < count) num *= 2;
    for (uint32_t i = count; i < num; ++i) leaves[i] = 0;
    for (num /= 2; num > 0; num /= 2) {
        KCCL_INDEPENDENT
        for (uint32_t i = 0; i < num; ++i) leaves[i] = leaves[2 * i] + leaves[2 * i + 1];
    }
    return leaves[0];
}

// The members are copied, because for the compiler a loop's stores could change them.
template <class T>
KCCL_DEVICE_SHARED void row_on_cpu(const NormedRows<T>& rows, uint64_t row) {
    constexpr uint32_t kPiece = kPieceBytes / sizeof(T);
    const uint32_t width = rows.width;
    const uint64_t begin = row * width;
    const T* const weight = rows.weight;
    const T* hidden = rows.in + begin;
    if (rows.residual != nullptr) {
        const T* const in = hidden;
        T* const sum = rows.residual + begin;
        KCCL_INDEPENDENT
        for (uint32_t i = 0; i < width; ++i) {
            const float first = Element<T>::widen(mem::load_plain(in + i));
            const float second = Element<T>::widen(mem::load_plain(sum + i));
            mem::store_plain(sum + i, Element<T>::narrow(first + second));
        }
        hidden = sum;
    }
    float total = 0;
    for (uint32_t at = 0; at < width; at += kPiece) {
        const uint32_t rest = width - at;
        total += piece_on_cpu(hidden + at, rest < kPiece ? rest : kPiece);
    }
    const float inverse = inverse_rms(total, width, rows.eps);
    if (rows.fp8_scale != nullptr) {
        auto* const out = static_cast<f8e4m3*>(rows.out) + begin;
        const float scale = mem::load_plain(rows.fp8_scale);
        KCCL_INDEPENDENT
        for (uint32_t i = 0; i < width; ++i) {
            const float value =
                normalised(mem::load_plain(hidden + i), inverse, mem::load_plain(weight + i));
            mem::store_plain(out + i, to_fp8(value, scale));
        }
    } else {
        T* const out = static_cast<T*>(rows.out) + begin;
        KCCL_INDEPENDENT
        for (uint32_t i = 0; i < width; ++i) {
            const float value =
                normalised(mem::load_plain(hidden + i), inverse, mem::load_plain(weight + i));
            mem::store_plain(out + i, Element<T>::narrow(value));
        }
    }
}

// ---- On a GPU --------------------------------------------------------------------------------

// The sums of the groups of two pieces, in block-shared memory. The pieces of a block take turns,
// so that a sync after each one is enough.
struct GroupSums {
    float of[2][kGroups];
};

// The tree of 32 neighbouring threads; each gets its root. Called by all threads of a warp.
KCCL_DEVICE float sum_of_group(float value) {
    const uint32_t lane = platform::thread_in_block() % platform::kWarpSize;
    KCCL_UNROLL
    for (uint32_t step = 1; step < kGroupPayloads; step *= 2) {
        value += platform::shuffle(value, lane ^ step);
    }
    return value;
}

// Adds two payloads, element by element, and rounds.
template <class T>
KCCL_DEVICE uint64_t add_payloads(uint64_t first, uint64_t second) {
    constexpr uint32_t kCount = kUnitElements<T>;
    T a[kCount], b[kCount];
    platform::copy_bytes(a, &first, sizeof(first));
    platform::copy_bytes(b, &second, sizeof(second));
    float acc[kCount];
    for (uint32_t k = 0; k < kCount; ++k)
        acc[k] = Element<T>::widen(a[k]) + Element<T>::widen(b[k]);
    uint64_t sum[1];
    narrow_unit<T>(sum, acc);
    return sum[0];
}

template <class T>
KCCL_DEVICE float squares_of(uint64_t payload) {
    constexpr uint32_t kCount = kUnitElements<T>;
    T elements[kCount];
    platform::copy_bytes(elements, &payload, sizeof(payload));
    float leaves[kCount];
    for (uint32_t k = 0; k < kCount; ++k) {
        const float value = Element<T>::widen(elements[k]);
        leaves[k] = mem::product(value, value);
    }
    for (uint32_t num = kCount / 2; num > 0; num /= 2) {
        for (uint32_t k = 0; k < num; ++k) leaves[k] = leaves[2 * k] + leaves[2 * k + 1];
    }
    return leaves[0];
}

// Adds payload i of a piece to the sum of its group. Called by all threads of a warp, whose
// payloads are neighbours; those behind the piece's end are nobody's.
template <class T>
KCCL_DEVICE void add_to_group(float* groups, uint32_t i, bool is_mine, uint64_t payload) {
    const float sum = sum_of_group(is_mine ? squares_of<T>(payload) : 0.0f);
    if (is_mine && i % kGroupPayloads == 0) mem::store_plain(groups + i / kGroupPayloads, sum);
}

// The sum of a piece of so many payloads, in every thread. Called by all threads of a warp, behind
// a sync.
KCCL_DEVICE float sum_of_groups(const float* groups, uint32_t payloads) {
    const uint32_t lane = platform::thread_in_block() % kGroupPayloads;
    const uint32_t num = (payloads + kGroupPayloads - 1) / kGroupPayloads;
    return sum_of_group(lane < num ? mem::load_plain(groups + lane) : 0.0f);
}

// Stores the result of a row, which is `hidden`. Called by all threads of the coop, behind a sync.
template <class T, class Coop>
KCCL_DEVICE void store_normalised(Coop coop, const NormedRows<T>& rows, const T* hidden,
                                  uint64_t row, float total) {
    constexpr uint32_t kCount = kUnitElements<T>;
    const uint64_t begin = row * rows.width;
    const float inverse = inverse_rms(total, rows.width, rows.eps);
    const bool is_fp8 = rows.fp8_scale != nullptr;
    const float scale = is_fp8 ? mem::load_plain(rows.fp8_scale) : 1.0f;
    const uint32_t num = num_payloads<T>(rows.width);
    for (uint32_t i = coop.index(); i < num; i += coop.size()) {
        uint64_t payload[1];
        T x[kCount], weight[kCount];
        load_payloads(payload, hidden, i, rows.width);
        platform::copy_bytes(x, payload, sizeof(payload));
        load_payloads(payload, rows.weight, i, rows.width);
        platform::copy_bytes(weight, payload, sizeof(payload));
        float values[kCount];
        for (uint32_t k = 0; k < kCount; ++k) values[k] = normalised(x[k], inverse, weight[k]);
        if (is_fp8) {
            auto* const out = static_cast<f8e4m3*>(rows.out) + begin;
            for (uint32_t k = 0; k < kCount; ++k) {
                const uint32_t at = i * kCount + k;
                if (at < rows.width) mem::store_plain(out + at, to_fp8(values[k], scale));
            }
        } else {
            narrow_unit<T>(payload, values);
            store_payloads(static_cast<T*>(rows.out) + begin, i, rows.width, payload);
        }
    }
}

}  // namespace kccl
