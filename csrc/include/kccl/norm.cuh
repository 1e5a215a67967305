// RMSNorm of rows, whose bits depend on the row only: not on the number of threads, blocks or
// ranks, nor on the target.
//
//     hidden = x + residual                                    added in float, rounded to the type
//     out = hidden / sqrt(mean(hidden * hidden) + eps) * weight    computed in float, rounded once
//
// The squares are added in the following order. A tree adds neighbours, 0 and 1, 2 and 3, then
// pairs of neighbours, and so on. Elements behind the row's end count as 0.
//
//     line     16 bytes of the row: a tree of its elements
//     column   two lines that are 512 bytes apart, added: what one thread of a GPU holds
//     group    1 KiB, 32 columns: a tree, by shuffles
//     piece    16 KiB, 16 groups: a tree, through block-shared memory
//     row      its pieces, added in order
#pragma once

#include "reduce.cuh"

namespace kccl {

constexpr uint32_t kLinePayloads = 2;
constexpr uint32_t kColumnLines = 2;
constexpr uint32_t kColumnPayloads = kColumnLines * kLinePayloads;
constexpr uint32_t kGroupColumns = 32;  // the threads of the smallest warp
constexpr uint32_t kGroupPayloads = kGroupColumns * kColumnPayloads;
constexpr uint32_t kPieceGroups = 16;
constexpr uint32_t kPieceColumns = kPieceGroups * kGroupColumns;

template <class T>
constexpr uint32_t kLineElements = kLinePayloads * kPayloadBytes / sizeof(T);
template <class T>
constexpr uint32_t kGroupElements = kGroupPayloads * kPayloadBytes / sizeof(T);

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

    // Returns the number of columns of a row, rounded up to whole groups.
    KCCL_DEVICE uint32_t num_columns() const {
        return (width + kGroupElements<T> - 1) / kGroupElements<T> * kGroupColumns;
    }

    // Tells whether every line of every array is whole and aligned, so that one access may move it.
    KCCL_DEVICE bool are_lines() const {
        const uint64_t addresses =
            reinterpret_cast<uint64_t>(in) | reinterpret_cast<uint64_t>(residual) |
            reinterpret_cast<uint64_t>(weight) | reinterpret_cast<uint64_t>(out);
        return width % kGroupElements<T> == 0 && addresses % sizeof(mem::Line) == 0;
    }

    const T* in;
    T* residual;  // rows that are added to `in`, and then get the sum; null for none
    const T* weight;
    const float* fp8_scale;  // null if the result is of type T
    void* out;
    uint64_t count;  // elements of all rows; rows are not counted, because a division would be slow
    uint32_t width;
    float eps;
};

// Returns the number by which the elements of a row are multiplied, if `total` is the sum of their
// squares. share: 1.0f / width, which a thread computes before it waits.
KCCL_DEVICE float inverse_rms(float total, float share, float eps) {
    return 1.0f / platform::square_root(mem::product(total, share) + eps);
}

// Returns an element of the result, not yet rounded to T.
template <class T>
KCCL_DEVICE float normalised(T hidden, float inverse, T weight) {
    return Element<T>::widen(hidden) * inverse * Element<T>::widen(weight);
}

// Adds neighbours until `num` of `count` values are left. `count` is num times a power of two.
KCCL_DEVICE void add_neighbours(float* values, uint32_t count, uint32_t num) {
    for (count /= 2; count >= num; count /= 2) {
        KCCL_INDEPENDENT
        for (uint32_t i = 0; i < count; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    }
}

// Returns the sum of the squares of one group. Only its first `count` elements are in the row.
template <class T>
KCCL_DEVICE float group_on_cpu(const T* hidden, uint32_t count) {
    constexpr uint32_t kCount = kGroupElements<T>;
    float sums[kCount];
    KCCL_INDEPENDENT
    for (uint32_t i = 0; i < count; ++i) {
        const float value = Element<T>::widen(mem::load_plain(hidden + i));
        sums[i] = value * value;  // a compiler cannot fuse it: no sum follows in this loop
    }
    for (uint32_t i = count; i < kCount; ++i) sums[i] = 0;
    add_neighbours(sums, kCount, kColumnLines * kGroupColumns);
    KCCL_INDEPENDENT
    for (uint32_t i = 0; i < kGroupColumns; ++i) sums[i] = sums[i] + sums[kGroupColumns + i];
    add_neighbours(sums, kGroupColumns, 1);
    return sums[0];
}

// Returns the sum of the squares of a row.
template <class T>
KCCL_DEVICE float squares_on_cpu(const T* hidden, uint32_t width) {
    float total = 0;
    float groups[kPieceGroups];
    uint32_t num = 0;
    for (uint32_t at = 0; at < width; at += kGroupElements<T>) {
        const uint32_t rest = width - at;
        groups[num++] =
            group_on_cpu(hidden + at, rest < kGroupElements<T> ? rest : kGroupElements<T>);
        if (num < kPieceGroups && rest > kGroupElements<T>) continue;
        while (num < kPieceGroups) groups[num++] = 0;
        add_neighbours(groups, kPieceGroups, 1);
        total += groups[0];
        num = 0;
    }
    return total;
}

// Adds the residual to one row, if there is one, and normalises the row. Copies members of `rows`
// to variables, because the compiler must assume that a loop's stores change the members.
template <class T>
KCCL_DEVICE_SHARED void row_on_cpu(const NormedRows<T>& rows, uint64_t row) {
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
    const float total = squares_on_cpu(hidden, width);
    const float inverse = inverse_rms(total, 1.0f / static_cast<float>(width), rows.eps);
    if (rows.fp8_scale != nullptr) {
        auto* const out = static_cast<f8e4m3*>(rows.out) + begin;
        const float scale = 1.0f / mem::load_plain(rows.fp8_scale);
        KCCL_INDEPENDENT
        for (uint32_t i = 0; i < width; ++i) {
            const float value =
                normalised(mem::load_plain(hidden + i), inverse, mem::load_plain(weight + i));
            mem::store_plain(out + i, f8e4m3{float8::limited_e4m3(value * scale)});
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

}  // namespace kccl
