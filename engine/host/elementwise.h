// Implements the functions of Compute other than products and attention, for the instruction set
// that the compiler's flags name.
#pragma once

#include "attention.h"
#include "multiply.h"

namespace kccl::engine {
namespace {

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

void swiglu_limited(const float* gate, const float* up, float limit, uint32_t n, float* out) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        // A NaN of gate or up stays a NaN, because smaller() and larger() return their second
        // argument if the comparison is false.
        const Floats16 g = smaller(all(limit), load_some(gate + i, num));
        const Floats16 u = larger(all(-limit), smaller(all(limit), load_some(up + i, num)));
        const Floats16 swish = g / (all(1.0f) + exp_of(all(-1.702f) * g));
        store_some(out + i, swish * (u + all(1.0f)), num);
    });
}

void powers(float* x, float most, uint32_t n) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(x + i, exp_of<true>(load_some(x + i, num) - all(most)), num);
    });
}

void add_scaled(float* x, const float* y, float scale, uint32_t n) {
    each_vector(n, [&](uint32_t i, uint32_t num) {
        store_some(x + i, load_some(x + i, num) + load_some(y + i, num) * all(scale), num);
    });
}

template <class Element>
inline Floats16 sum_at(const Element* const* arrays, int num_arrays, uint32_t i, uint32_t num) {
    Floats16 sum = load_some(arrays[0] + i, num);
    for (int a = 1; a < num_arrays; ++a) sum = sum + load_some(arrays[a] + i, num);
    return sum;
}

template <class Element>
void add_sum(float* x, const Element* const* arrays, int num_arrays, uint32_t n) {
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

void round_to_bf16(const float* x, uint32_t n, uint16_t* out) {
    for (uint32_t i = 0; i < n; ++i) {
        uint32_t bits;
        __builtin_memcpy(&bits, x + i, sizeof(bits));
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        const uint32_t rounded = is_nan ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
        out[i] = static_cast<uint16_t>(rounded >> 16);
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

#define KCCL_ENGINE_MULTIPLY(FORMAT) multiply<FORMAT>,
#define KCCL_ENGINE_PREPARE(FORMAT) prepare_of<FORMAT>(),
[[maybe_unused]] constexpr Compute kTable = {nullptr,
                                             {KCCL_ENGINE_FORMATS(KCCL_ENGINE_MULTIPLY)},
                                             {KCCL_ENGINE_FORMATS(KCCL_ENGINE_PREPARE)},
                                             touch,
                                             rms_norm,
                                             attend,
                                             rotate,
                                             swiglu,
                                             swiglu_limited,
                                             powers,
                                             add_scaled,
                                             add_sum<float>,
                                             add_sum<uint16_t>,
                                             mean,
                                             round_to_bf16,
                                             peak};
#undef KCCL_ENGINE_MULTIPLY
#undef KCCL_ENGINE_PREPARE

constexpr Compute named(const char* name) {
    Compute table = kTable;
    table.name = name;
    return table;
}

}  // namespace
}  // namespace kccl::engine
