// Columns: what the threads of a GPU hold of a row, and how they normalise it. A column is two
// lines of 16 bytes, 32 columns are a group, and 16 groups a piece. norm.cuh defines them, and the
// order in which squares are added.
//
// A thread adds the squares of its own column. The threads of a group add their sums by shuffles,
// and store the group's sum in block-shared memory. After a sync every thread adds the sums of all
// groups.
#pragma once

#include "norm.cuh"

namespace kccl {

// The sums of the groups of two pieces, in block-shared memory. A block's pieces use the two arrays
// in turn, so that one sync after each piece is enough.
struct GroupSums {
    mem::Line of[2][kPieceGroups * sizeof(float) / sizeof(mem::Line)];

    KCCL_DEVICE float* piece(uint32_t turn) { return reinterpret_cast<float*>(of[turn % 2]); }
    KCCL_DEVICE const mem::Line* lines(uint32_t turn) const { return of[turn % 2]; }
};

// Returns the index in the row of the first element of a column's line; `line` is 0 or 1.
template <class T>
KCCL_DEVICE uint32_t element_of(uint32_t column, uint32_t line) {
    const uint32_t group = column / kGroupColumns;
    const uint32_t first = (group * kColumnLines + line) * kGroupColumns + column % kGroupColumns;
    return first * kLineElements<T>;
}

// Loads a column of a row. Elements behind the row's end become zero. are_lines: see NormedRows.
template <class T>
KCCL_DEVICE void load_column(uint64_t (&payloads)[kColumnPayloads], const T* row, uint32_t column,
                             uint32_t width, bool are_lines) {
    KCCL_UNROLL
    for (uint32_t k = 0; k < kColumnLines; ++k) {
        const uint32_t first = element_of<T>(column, k);
        uint64_t words[kLinePayloads] = {0, 0};
        if (are_lines) {
            const mem::Line line = mem::load_plain(reinterpret_cast<const mem::Line*>(row + first));
            words[0] = line.word[0];
            words[1] = line.word[1];
        } else if (first < width) {
            load_payloads(words, row, first / kUnitElements<T>, width);
        }
        payloads[k * kLinePayloads] = words[0];
        payloads[k * kLinePayloads + 1] = words[1];
    }
}

template <class T>
KCCL_DEVICE void store_column(T* row, uint32_t column, uint32_t width, bool are_lines,
                              const uint64_t (&payloads)[kColumnPayloads]) {
    KCCL_UNROLL
    for (uint32_t k = 0; k < kColumnLines; ++k) {
        const uint32_t first = element_of<T>(column, k);
        const uint64_t words[kLinePayloads] = {payloads[k * kLinePayloads],
                                               payloads[k * kLinePayloads + 1]};
        if (are_lines) {
            mem::store_plain(reinterpret_cast<mem::Line*>(row + first),
                             mem::Line{{words[0], words[1]}});
        } else if (first < width) {
            store_payloads(row, first / kUnitElements<T>, width, words);
        }
    }
}

// Rounds values to T and returns them as a payload. A NaN may become another NaN: a row's threads
// check for NaN only once, in the sum of the row's squares (store_canonical()).
template <class T, uint32_t N>
KCCL_DEVICE uint64_t round_payload(const float (&values)[N]) {
#if defined(KCCL_MEM_KEEPS_NAN)
    uint32_t words[2];
    if constexpr (kNarrowsPairs<T>) {
        for (uint32_t k = 0; k < N; k += 2) {
            words[k / 2] = Element<T>::narrow_pair(values[k], values[k + 1]);
        }
    } else {
        static_assert(sizeof(T) == sizeof(float), "float, or narrowed in pairs");
        for (uint32_t k = 0; k < N; ++k) words[k] = platform::bit_cast<uint32_t>(values[k]);
    }
    return words[0] | static_cast<uint64_t>(words[1]) << 32;
#else
    uint64_t unit[1];
    narrow_unit<T>(unit, values);
    return unit[0];
#endif
}

// Adds the elements of a payload to `values`.
template <class T, uint32_t N>
KCCL_DEVICE void add_payload(float (&values)[N], uint64_t payload) {
    T elements[N];
    platform::copy_bytes(elements, &payload, sizeof(payload));
    for (uint32_t k = 0; k < N; ++k) values[k] += Element<T>::widen(elements[k]);
}

template <class T, uint32_t N>
KCCL_DEVICE void widen_payload(float (&values)[N], uint64_t payload) {
    T elements[N];
    platform::copy_bytes(elements, &payload, sizeof(payload));
    for (uint32_t k = 0; k < N; ++k) values[k] = Element<T>::widen(elements[k]);
}

// Adds two payloads, element by element, and rounds.
template <class T>
KCCL_DEVICE uint64_t add_payloads(uint64_t first, uint64_t second) {
    float values[kUnitElements<T>];
    widen_payload<T>(values, first);
    add_payload<T>(values, second);
    return round_payload<T>(values);
}

// Makes each NaN of a payload the canonical one.
template <class T>
KCCL_DEVICE uint64_t canonical(uint64_t payload) {
    float values[kUnitElements<T>];
    widen_payload<T>(values, payload);
    uint64_t unit[1];
    narrow_unit<T>(unit, values);
    return unit[0];
}

// Returns the sum of NUM values, added as a tree in registers. NUM is a power of two.
template <uint32_t NUM>
KCCL_DEVICE float sum_of_tree(float (&values)[NUM]) {
    KCCL_UNROLL
    for (uint32_t step = 1; step < NUM; step *= 2) {
        KCCL_UNROLL
        for (uint32_t k = 0; k < NUM; k += 2 * step) values[k] += values[k + step];
    }
    return values[0];
}

// Returns the sum of the squares of a payload's elements, added as a tree.
template <class T>
KCCL_DEVICE float squares_of(uint64_t payload) {
    float leaves[kUnitElements<T>];
    widen_payload<T>(leaves, payload);
    for (float& leaf : leaves) leaf = mem::product(leaf, leaf);
    return sum_of_tree(leaves);
}

// Adds the squares of this thread's column and of all columns of its group, and stores the group's
// sum in `groups`. is_mine: whether the thread has a column. Called by all threads of a warp, whose
// columns are neighbours.
template <class T>
KCCL_DEVICE void add_to_group(float* groups, uint32_t column, bool is_mine,
                              const uint64_t (&payloads)[kColumnPayloads]) {
    float sum = (squares_of<T>(payloads[0]) + squares_of<T>(payloads[1])) +
                (squares_of<T>(payloads[2]) + squares_of<T>(payloads[3]));
    const uint32_t lane = platform::thread_in_block() % platform::kWarpSize;
    KCCL_UNROLL
    for (uint32_t step = 1; step < kGroupColumns; step *= 2) {
        sum += platform::shuffle(sum, lane ^ step);
    }
    if (is_mine && column % kGroupColumns == 0) {
        mem::store_plain(groups + column / kGroupColumns, sum);
    }
}

// Stores zero as the sums of those groups that a piece of `columns` columns does not have. Called
// by all threads of the coop, a warp or a block.
template <class Coop>
KCCL_DEVICE void clear_groups(Coop coop, float* groups, uint32_t columns) {
    const uint32_t group = columns / kGroupColumns + coop.index();
    if (group < kPieceGroups) mem::store_plain(groups + group, 0.0f);
}

// Returns the sum of a piece from the sums of its groups. Called after a sync of the block, behind
// which all groups' sums are stored.
KCCL_DEVICE float sum_of_groups(const mem::Line* groups) {
    float sums[kPieceGroups];
    KCCL_UNROLL
    for (uint32_t k = 0; k < kPieceGroups; k += 4) {
        const mem::Line line = mem::load_plain(groups + k / 4);
        sums[k] = platform::bit_cast<float>(static_cast<uint32_t>(line.word[0]));
        sums[k + 1] = platform::bit_cast<float>(static_cast<uint32_t>(line.word[0] >> 32));
        sums[k + 2] = platform::bit_cast<float>(static_cast<uint32_t>(line.word[1]));
        sums[k + 3] = platform::bit_cast<float>(static_cast<uint32_t>(line.word[1] >> 32));
    }
    return sum_of_tree(sums);
}

// Stores this thread's column of the sum with the residual again, now with canonical NaNs, if the
// row may have a NaN: if `total`, the sum of the row's squares, is NaN.
template <class T>
KCCL_DEVICE void store_canonical(const NormedRows<T>& rows, uint64_t row, uint32_t column,
                                 bool are_lines, const uint64_t (&hidden)[kColumnPayloads],
                                 float total) {
    if (total == total || rows.residual == nullptr) return;
    uint64_t numbers[kColumnPayloads];
    KCCL_UNROLL
    for (uint32_t k = 0; k < kColumnPayloads; ++k) numbers[k] = canonical<T>(hidden[k]);
    store_column(rows.residual + row * rows.width, column, rows.width, are_lines, numbers);
}

// Returns 1 / number. Makes the compiler compute it here, and not where the result is used.
KCCL_DEVICE float inverse_now(float number) {
    return platform::bit_cast<float>(mem::forget(platform::bit_cast<uint32_t>(1.0f / number)));
}

// Normalises a column and stores it in rows.out. inverse: what inverse_rms() has returned for the
// row. scale: 1 divided by the caller's fp8_scale.
template <class T>
KCCL_DEVICE void store_normalised(const NormedRows<T>& rows, uint64_t row, uint32_t column,
                                  bool are_lines, const uint64_t (&hidden)[kColumnPayloads],
                                  const uint64_t (&weight)[kColumnPayloads], float inverse,
                                  float scale) {
    constexpr uint32_t kCount = kUnitElements<T>;
    const uint64_t begin = row * rows.width;
    const bool is_fp8 = rows.fp8_scale != nullptr;
    uint64_t results[kColumnPayloads];
    uint32_t small[kColumnPayloads];  // with fp8_scale: the 2 or 4 bytes that a payload becomes
    KCCL_UNROLL
    for (uint32_t n = 0; n < kColumnPayloads; ++n) {
        T x[kCount], w[kCount];
        platform::copy_bytes(x, &hidden[n], sizeof(hidden[n]));
        platform::copy_bytes(w, &weight[n], sizeof(weight[n]));
        float values[kCount];
        for (uint32_t k = 0; k < kCount; ++k) values[k] = normalised(x[k], inverse, w[k]);
        if (is_fp8) {
            small[n] = 0;
            for (uint32_t k = 0; k < kCount; k += 2) {
                small[n] |= float8::limited_e4m3s(values[k] * scale, values[k + 1] * scale)
                            << 8 * k;
            }
        } else {
            uint64_t result[1];
            narrow_unit<T>(result, values);
            results[n] = result[0];
        }
    }
    if (!is_fp8) {
        store_column(static_cast<T*>(rows.out) + begin, column, rows.width, are_lines, results);
        return;
    }
    auto* const out = static_cast<uint8_t*>(rows.out) + begin;
    KCCL_UNROLL
    for (uint32_t k = 0; k < kColumnLines; ++k) {
        const uint32_t first = element_of<T>(column, k);
        constexpr uint32_t kBits = 8 * kCount;  // bits of the elements of one payload
        const uint64_t line =
            small[k * kLinePayloads] | static_cast<uint64_t>(small[k * kLinePayloads + 1]) << kBits;
        if (are_lines && kLineElements<T> == 8) {
            mem::store_plain(reinterpret_cast<uint64_t*>(out + first), line);
        } else if (are_lines) {
            mem::store_plain(reinterpret_cast<uint32_t*>(out + first), static_cast<uint32_t>(line));
        } else {
            for (uint32_t i = 0; i < kLineElements<T> && first + i < rows.width; ++i) {
                mem::store_plain(out + first + i, static_cast<uint8_t>(line >> 8 * i));
            }
        }
    }
}

}  // namespace kccl
