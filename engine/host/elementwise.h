// All but the products, for one instruction set: loops over vectors of 16, which the compiler makes
// of the registers it has. The file that includes this sets the compiler's flags.
#pragma once

#include "compute.h"

namespace kccl::engine {
namespace {

typedef float Floats16 __attribute__((vector_size(64)));
typedef int32_t Ints16 __attribute__((vector_size(64)));

inline Floats16 load(const float* from) {
    Floats16 value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
}

inline void store(float* to, Floats16 value) { __builtin_memcpy(to, &value, sizeof(value)); }

inline Floats16 all(float value) { return Floats16{} + value; }

// The last, incomplete vector of an array: zeros behind the end.
inline Floats16 load_part(const float* from, uint32_t n) {
    Floats16 value = {};
    __builtin_memcpy(&value, from, n * sizeof(float));
    return value;
}

inline void store_part(float* to, Floats16 value, uint32_t n) {
    __builtin_memcpy(to, &value, n * sizeof(float));
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

inline void store_some(float* to, Floats16 value, uint32_t n) {
    n == 16 ? store(to, value) : store_part(to, value, n);
}

// In this order: halves are added until one element is left.
inline float sum_of(Floats16 v) {
    float a[16];
    store(a, v);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a[i] += a[i + half];
    }
    return a[0];
}

inline float largest_of(Floats16 v) {
    float a[16];
    store(a, v);
    float most = a[0];
    for (int i = 1; i < 16; ++i) most = a[i] > most ? a[i] : most;
    return most;
}

inline Floats16 larger(Floats16 a, Floats16 b) { return a > b ? a : b; }

// exp, to within 2 units in the last place; 0 below -87, infinity above 88.7. Cephes' polynomial.
inline Floats16 exp_of(Floats16 x) {
    const Floats16 bounded = larger(all(-87.3f), x < all(88.7f) ? x : all(88.7f));
    // Adding 1.5 * 2^23 rounds to an integer.
    const Floats16 shifted = bounded * 1.44269504f + 12582912.0f;
    const Floats16 n = shifted - 12582912.0f;
    const Floats16 r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats16 p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints16 exponent = __builtin_convertvector(n, Ints16);
    // In two steps, because 2^128 is no float.
    const Ints16 half = exponent >> 1;
    const Floats16 a = (Floats16)((half + 127) << 23);
    const Floats16 b = (Floats16)((exponent - half + 127) << 23);
    const Floats16 value = p * a * b;
    return x < all(-87.3f) ? Floats16{} : x > all(88.7f) ? all(__builtin_inff()) : value;
}

void rms_norm(const float* x, const float* weight, uint32_t n, float eps, float* out) {
    Floats16 sums[4] = {};
    uint32_t turn = 0;
    each_vector(n, [&](uint32_t i, uint32_t num) {
        const Floats16 v = load_some(x + i, num);
        sums[turn++ % 4] += v * v;
    });
    const float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(out + i, load_some(x + i, num) * scale * load_some(weight + i, num), num);
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
    const uint64_t stride = uint64_t{k.head_dim} * kKeyBlock;
    const float* keys = k.keys + block * stride;
    Floats16 sums[BLOCKS] = {};
    for (uint32_t i = 0; i < k.head_dim; ++i) {
        KCCL_ENGINE_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            sums[b] += load(keys + b * stride + uint64_t{i} * kKeyBlock) * query[i];
        }
    }
    constexpr Ints16 kPlaces = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    KCCL_ENGINE_UNROLL
    for (int b = 0; b < BLOCKS; ++b) {
        const auto base = static_cast<int32_t>((block + b) * kKeyBlock);
        const Ints16 position = kPlaces + base;
        const Ints16 is_seen = (position >= static_cast<int32_t>(k.first)) &
                               (position < static_cast<int32_t>(k.end));
        const Floats16 score = is_seen ? sums[b] * k.scale : all(-__builtin_inff());
        store(scores + base, score);
        most = larger(most, score);
    }
    return most;
}

void attend(const float* query, const Keys& k, float* scores, float* out) {
    const uint32_t first = k.first / kKeyBlock, end = (k.end + kKeyBlock - 1) / kKeyBlock;
    Floats16 most = all(-__builtin_inff());
    uint32_t block = first;
    for (; block + 4 <= end; block += 4) most = score_blocks<4>(query, k, block, scores, most);
    for (; block < end; ++block) most = score_blocks<1>(query, k, block, scores, most);
    const float peak = largest_of(most);
    Floats16 sums = {};
    for (block = first; block < end; ++block) {
        const Floats16 weight = exp_of(load(scores + block * kKeyBlock) - peak);
        store(scores + block * kKeyBlock, weight);
        sums += weight;
    }
    const float scale = 1.0f / sum_of(sums);
    const uint32_t stride = padded(k.head_dim);
    for (uint32_t i = 0; i < stride; i += 64) {
        Floats16 total[4] = {};
        const int num = static_cast<int>((stride - i) / 16 < 4 ? (stride - i) / 16 : 4);
        const float* value = k.values + uint64_t{k.first} * stride + i;
        if (num == 4) {
            for (uint32_t p = k.first; p < k.end; ++p, value += stride) {
                KCCL_ENGINE_UNROLL
                for (int v = 0; v < 4; ++v) total[v] += load(value + v * 16) * scores[p];
            }
        } else {
            for (uint32_t p = k.first; p < k.end; ++p, value += stride) {
                for (int v = 0; v < num; ++v) total[v] += load(value + v * 16) * scores[p];
            }
        }
        for (int v = 0; v < num; ++v) {
            const uint32_t at = i + v * 16;
            if (at < k.head_dim) {
                const uint32_t left = k.head_dim - at;
                store_some(out + at, total[v] * scale, left < 16 ? left : 16);
            }
        }
    }
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
        store_some(out + i, g / (1.0f + exp_of(-g)) * load_some(up + i, num), num);
    });
}

void add_scaled(float* x, const float* y, float scale, uint32_t n) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(x + i, load_some(x + i, num) + load_some(y + i, num) * scale, num);
    });
}

inline Floats16 sum_at(const float* const* arrays, int num_arrays, uint32_t i, uint32_t num) {
    Floats16 sum = load_some(arrays[0] + i, num);
    for (int a = 1; a < num_arrays; ++a) sum += load_some(arrays[a] + i, num);
    return sum;
}

void add_sum(float* x, const float* const* arrays, int num_arrays, uint32_t n) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(x + i, load_some(x + i, num) + sum_at(arrays, num_arrays, i, num), num);
    });
}

void mean(float* out, const float* const* arrays, int num_arrays, uint32_t n) {
    const float divisor = static_cast<float>(num_arrays);
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

uint32_t touch(const void* from, uint64_t num_bytes) {
    Ints16 seen[4] = {};
    const auto* bytes = static_cast<const uint8_t*>(from);
    for (uint64_t i = 0; i + 256 <= num_bytes; i += 256) {
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < 4; ++v) {
            Ints16 value;
            __builtin_memcpy(&value, bytes + i + v * 64, sizeof(value));
            seen[v] ^= value;
        }
    }
    const Ints16 together = (seen[0] ^ seen[1]) ^ (seen[2] ^ seen[3]);
    uint32_t result = 0;
    for (int i = 0; i < 16; ++i) result ^= static_cast<uint32_t>(together[i]);
    return result;
}

[[maybe_unused]] constexpr Compute kTable = {
    nullptr,  multiply, touch,      rms_norm, pack, attend,       rotate,
    swiglu, add_scaled, add_sum, mean,     round_to_bf16};

constexpr Compute named(const char* name) {
    Compute table = kTable;
    table.name = name;
    return table;
}

}  // namespace
}  // namespace kccl::engine
