// All but the products, for the instruction set that the compiler's flags name.
#pragma once

#include "compute.h"
#include "multiply.h"
#include "vector16.h"

namespace kccl::engine {
namespace {

// The last, incomplete vector of an array: zeros past the end.
inline Floats16 load_part(const float* from, uint32_t n) {
    float all_of[16] = {};
    __builtin_memcpy(all_of, from, n * sizeof(float));
    return load(all_of);
}

inline void store_part(float* to, const Floats16& value, uint32_t n) {
    float all_of[16];
    store(all_of, value);
    __builtin_memcpy(to, all_of, n * sizeof(float));
}

// Calls f(first element, number of elements) for each vector of an array.
template <class F>
inline void each_vector(uint32_t n, F f) {
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) f(i, 16u);
    if (i < n) f(i, n - i);
}

inline Floats16 load_some(const float* from, uint32_t n) {
    return n == 16 ? load(from) : load_part(from, n);
}

inline void store_some(float* to, const Floats16& value, uint32_t n) {
    n == 16 ? store(to, value) : store_part(to, value, n);
}

// In this order: halves are added until one element is left.
inline float sum_of(const Floats16& v) {
    float a[16];
    store(a, v);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a[i] += a[i + half];
    }
    return a[0];
}

inline float largest_of(const Floats16& v) {
    float a[16];
    store(a, v);
    float most = a[0];
    for (int i = 1; i < 16; ++i) most = a[i] > most ? a[i] : most;
    return most;
}

// exp, to within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN of NaN. Cephes'
// polynomial.
inline Floats16 exp_of(const Floats16& x) {
    const Floats16 low = all(-87.3f), high = all(88.7f);
    const Floats16 bounded = larger(low, smaller(x, high));
    // Adding 1.5 * 2^23 rounds to an integer.
    const Floats16 rounds = all(12582912.0f);
    const Floats16 n = (bounded * all(1.44269504f) + rounds) - rounds;
    const Floats16 r = (bounded - n * all(0.693359375f)) + n * all(2.12194440e-4f);
    Floats16 p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    // In two steps, because 2^128 is no float.
    const Ints16 exponent = to_ints(n), half = half_of(exponent);
    const Floats16 value = p * power_of_two(half) * power_of_two(exponent - half);
    const Floats16 of_numbers =
        select(is_less(x, low), all(0.0f), select(is_less(high, x), all(__builtin_inff()), value));
    // The bounds turn NaN into a number.
    return select(is_equal(x, x), of_numbers, x);
}

void rms_norm(const float* x, const float* weight, uint32_t n, float eps, float* out) {
    Floats16 sums[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
    each_vector(n, [&](uint32_t i, uint32_t num) {
        const Floats16 v = load_some(x + i, num);
        Floats16& sum = sums[i / 16 % 4];
        sum = sum + v * v;
    });
    const float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(out + i, load_some(x + i, num) * all(scale) * load_some(weight + i, num), num);
    });
}

template <int COLUMNS>
void pack_columns(const float* const* columns, int num_columns, uint32_t n, float* packed) {
    for (int c = 0; c < COLUMNS; ++c) {
        const float* from = c < num_columns ? columns[c] : nullptr;
        for (uint32_t k = 0; k < n; ++k) packed[k * COLUMNS + c] = from != nullptr ? from[k] : 0;
        if (n % 2 != 0) packed[n * COLUMNS + c] = 0;
    }
}

void pack(const float* const* columns, int num_columns, uint32_t n, float* packed) {
    switch (padded_columns(num_columns)) {
        case 1: return pack_columns<1>(columns, num_columns, n, packed);
        case 2: return pack_columns<2>(columns, num_columns, n, packed);
        case 4: return pack_columns<4>(columns, num_columns, n, packed);
        default: return pack_columns<kGroup>(columns, num_columns, n, packed);
    }
}

// The scores of BLOCKS blocks of keys; returns the largest of each place.
template <int BLOCKS>
inline Floats16 score_blocks(const float* query, const Keys& k, uint32_t block, float* scores,
                             Floats16 most) {
    static constexpr int32_t kPlaces[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint64_t stride = uint64_t{k.head_dim} * kKeyBlock;
    const float* keys = k.keys + block * stride;
    Floats16 sums[BLOCKS];
    KCCL_ENGINE_UNROLL
    for (int b = 0; b < BLOCKS; ++b) sums[b] = all(0.0f);
    for (uint32_t i = 0; i < k.head_dim; ++i) {
        const Floats16 factor = all(query[i]);
        KCCL_ENGINE_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            sums[b] = sums[b] + load(keys + b * stride + uint64_t{i} * kKeyBlock) * factor;
        }
    }
    const Ints16 places = load(kPlaces);
    KCCL_ENGINE_UNROLL
    for (int b = 0; b < BLOCKS; ++b) {
        const auto base = static_cast<int32_t>((block + b) * kKeyBlock);
        const Ints16 position = places + all(base);
        const Ints16 is_seen = is_less(all(static_cast<int32_t>(k.first) - 1), position) &
                               is_less(position, all(static_cast<int32_t>(k.end)));
        const Floats16 score = select(is_seen, sums[b] * all(k.scale), all(-__builtin_inff()));
        store(scores + base, score);
        most = larger(most, score);
    }
    return most;
}

// Adds the values from element `first` on, VECTORS vectors of them, by their weights.
template <int VECTORS>
inline void add_values(const Keys& k, const float* weights, uint32_t first, float scale,
                       float* out) {
    const uint32_t stride = padded(k.head_dim);
    const float* value = k.values + uint64_t{k.first} * stride + first;
    Floats16 sums[VECTORS];
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) sums[v] = all(0.0f);
    for (uint32_t p = k.first; p < k.end; ++p, value += stride) {
        const Floats16 weight = all(weights[p]);
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) sums[v] = sums[v] + load(value + v * 16) * weight;
    }
    for (int v = 0; v < VECTORS; ++v) {
        const uint32_t at = first + v * 16, left = k.head_dim - at;
        store_some(out + at, sums[v] * all(scale), left < 16 ? left : 16);
    }
}

void attend(const float* query, const Keys& k, float* scores, float* out) {
    const uint32_t first = k.first / kKeyBlock, end = (k.end + kKeyBlock - 1) / kKeyBlock;
    Floats16 most = all(-__builtin_inff());
    uint32_t block = first;
    for (; block + 4 <= end; block += 4) most = score_blocks<4>(query, k, block, scores, most);
    for (; block < end; ++block) most = score_blocks<1>(query, k, block, scores, most);
    const Floats16 peak = all(largest_of(most));
    Floats16 sums = all(0.0f);
    for (block = first; block < end; ++block) {
        const Floats16 weight = exp_of(load(scores + block * kKeyBlock) - peak);
        store(scores + block * kKeyBlock, weight);
        sums = sums + weight;
    }
    const float scale = 1.0f / sum_of(sums);
    uint32_t i = 0;
    for (; i + 48 < k.head_dim; i += 64) add_values<4>(k, scores, i, scale, out);
    for (; i < k.head_dim; i += 16) add_values<1>(k, scores, i, scale, out);
}

void rotate(float* x, const float* cosines, const float* sines, uint32_t head_dim) {
    for (uint32_t i = 0; i < head_dim / 2; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
}

void swiglu(const float* gate, const float* up, uint32_t n, float* out) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        const Floats16 g = load_some(gate + i, num);
        const Floats16 silu = g / (all(1.0f) + exp_of(all(0.0f) - g));
        store_some(out + i, silu * load_some(up + i, num), num);
    });
}

void add_scaled(float* x, const float* y, float scale, uint32_t n) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(x + i, load_some(x + i, num) + load_some(y + i, num) * all(scale), num);
    });
}

inline Floats16 sum_at(const float* const* arrays, int num_arrays, uint32_t i, uint32_t num) {
    Floats16 sum = load_some(arrays[0] + i, num);
    for (int a = 1; a < num_arrays; ++a) sum = sum + load_some(arrays[a] + i, num);
    return sum;
}

void add_sum(float* x, const float* const* arrays, int num_arrays, uint32_t n) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(x + i, load_some(x + i, num) + sum_at(arrays, num_arrays, i, num), num);
    });
}

void mean(float* out, const float* const* arrays, int num_arrays, uint32_t n) {
    const Floats16 divisor = all(static_cast<float>(num_arrays));
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(out + i, sum_at(arrays, num_arrays, i, num) / divisor, num);
    });
}

void round_to_bf16(const float* x, uint32_t n, float* out) {
    for (uint32_t i = 0; i < n; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, x + i, sizeof(bits));
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        const uint32_t rounded = is_nan ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
        const uint32_t kept = rounded & 0xffff0000;
        __builtin_memcpy(out + i, &kept, sizeof(kept));
    }
}

Peak peak(const float* x, uint32_t n) {
    Floats16 most = all(-__builtin_inff());
    Ints16 numbers = all(int32_t{0});
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const Floats16 v = load(x + i);
        most = larger(most, v);
        numbers = numbers - is_equal(v, v);
    }
    Peak found = {largest_of(most), 0, false};
    int32_t count[16];
    store(count, numbers);
    for (const int32_t each : count) found.has_nan |= each != static_cast<int32_t>(n / 16);
    for (; i < n; ++i) {
        found.value = x[i] > found.value ? x[i] : found.value;
        found.has_nan |= x[i] != x[i];
    }
    while (found.index + 1 < n && x[found.index] != found.value) ++found.index;
    return found;
}

uint32_t touch(const void* from, uint64_t num_bytes) {
    const Ints16 none = all(int32_t{0});
    Ints16 seen[4] = {none, none, none, none};
    const auto* words_of = static_cast<const int32_t*>(from);
    for (uint64_t i = 0; i + 64 <= num_bytes / 4; i += 64) {
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < 4; ++v) {
            seen[v] = seen[v] ^ load(words_of + i + v * 16);
        }
    }
    const Ints16 together = (seen[0] ^ seen[1]) ^ (seen[2] ^ seen[3]);
    int32_t words[16], result = 0;
    store(words, together);
    for (const int32_t word : words) result ^= word;
    return static_cast<uint32_t>(result);
}

[[maybe_unused]] constexpr Compute kTable = {nullptr, multiply,      touch,  rms_norm,   pack,
                                             attend,  rotate,        swiglu, add_scaled, add_sum,
                                             mean,    round_to_bf16, peak};

constexpr Compute named(const char* name) {
    Compute table = kTable;
    table.name = name;
    return table;
}

}  // namespace
}  // namespace kccl::engine
