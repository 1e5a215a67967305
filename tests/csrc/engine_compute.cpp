// Every function of the engine's compute.h on every instruction set of this CPU: the same bits. And
// the products and exp against double precision. Exits with 1 at the first difference. At the end
// it prints the instruction sets and a number made of all results, which other machines print too.
// With an argument it takes fewer sizes. If ONLY_BASELINE is defined it needs no file of another
// instruction set.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "engine_blocks.h"
#include "engine_groups.h"

namespace kccl::engine {
extern const Compute kComputeBaseline;
#if defined(__x86_64__) && defined(ONLY_BASELINE)
// Why: compute.cpp names them.
extern const Compute kComputeV3 = kComputeBaseline;
extern const Compute kComputeV4 = kComputeBaseline;
extern const Compute kComputeVnni = kComputeBaseline;
#elif defined(__x86_64__)
extern const Compute kComputeV3;
extern const Compute kComputeV4;
extern const Compute kComputeVnni;
#endif
}  // namespace kccl::engine

// compute() is not called here.
extern "C" const char* kccl_host_instruction_set() { return "baseline"; }

namespace {

float bf16(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &word, sizeof(value));
    return value;
}

float float16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 0
                           ? std::ldexp(static_cast<float>(mantissa), -24)
                           : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return bits >> 15 != 0 ? -size : size;
}

// The numbers of a format of 16 bits, none of them infinite or NaN: those of random bits. BF16's
// exponents are near that of 1, so that sums stay finite.
struct Known {
    uint32_t format;
    float (*value)(uint16_t);
};
uint16_t random_bits(const Known& known) {
    const auto bits = static_cast<uint16_t>(rng());
    if (known.value == bf16) return (bits & 0x83ff) | 0x3c00;
    return (bits & 0x7c00) == 0x7c00 ? bits & 0x83ff : bits;
}

void products(const std::vector<const Compute*>& tables, const Known& known, uint32_t num_columns,
              int num_panels) {
    const uint32_t num_pairs = pairs_for(num_columns);
    const uint64_t elements = uint64_t{num_pairs} * 2 * kRows;
    if (kFormats[known.format].panel_bytes(num_columns) != 2 * elements) fail("panel", "all");
    std::vector<uint16_t> panels(elements * num_panels + 8192);
    for (uint64_t i = 0; i < elements * num_panels; ++i) panels[i] = random_bits(known);
    for (int columns = 1; columns <= kGroup; ++columns) {
        const uint64_t stride = elements / kRows + 3;
        const Floats x = random_floats(stride * padded_columns(columns));
        const auto run = [&](const Compute& on) {
            Floats out(size_t{kGroup} * kPanels * kRows, 7);
            on.multiply[known.format](reinterpret_cast<const uint8_t*>(panels.data()), num_panels,
                                      num_pairs, x.data(), stride, columns, out.data());
            // What lies behind the last column or panel may be anything.
            for (int c = 0; c < kGroup; ++c) {
                for (int row = 0; row < kPanels * kRows; ++row) {
                    if (c >= columns || row >= num_panels * kRows) {
                        out[c * kPanels * kRows + row] = 0;
                    }
                }
            }
            return out;
        };
        same_bits("multiply", tables, run);
        const Floats out = run(*tables[0]);
        for (int c = 0; c < columns; ++c) {
            for (int row = 0; row < num_panels * kRows; ++row) {
                double sum = 0, size = 0;
                for (uint32_t k = 0; k < elements / kRows; ++k) {
                    const uint64_t at =
                        row / kRows * elements + k / 2 * 2 * kRows + row % kRows * 2 + k % 2;
                    const double term = double{known.value(panels[at])} * x[c * stride + k];
                    sum += term;
                    size += std::fabs(term);
                }
                if (std::fabs(out[c * kPanels * kRows + row] - sum) > 1e-5 * size) {
                    fail("multiply", "every instruction set, from the right result,");
                }
            }
        }
    }
}

// Rows of a table: every finite number.
void all_values(const Known& known) {
    for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        const uint32_t exponent = known.value == bf16 ? 0x7f80 : 0x7c00;
        if ((bits & exponent) == exponent) continue;
        float found;
        kFormats[known.format].widen(reinterpret_cast<const uint8_t*>(&half), 1, &found);
        if (found != known.value(half)) fail("widen", "every instruction set");
    }
}

void elementwise(const std::vector<const Compute*>& tables, uint32_t n) {
    const Floats x = random_floats(n, 3), y = random_floats(n, 3), z = random_floats(n, 3);
    const float* arrays[] = {x.data(), y.data(), z.data()};
    same_bits("rms_norm", tables, [&](const Compute& on) {
        Floats out(n);
        on.rms_norm(x.data(), y.data(), n, 1e-5f, out.data());
        return out;
    });
    same_bits("swiglu", tables, [&](const Compute& on) {
        Floats out(n);
        on.swiglu(x.data(), y.data(), n, out.data());
        return out;
    });
    same_bits("add_scaled, add_sum and mean", tables, [&](const Compute& on) {
        Floats sum = x, out(n);
        on.add_scaled(sum.data(), y.data(), 1.7f, n);
        on.add_sum(sum.data(), arrays, 3, n);
        on.mean(out.data(), arrays, 3, n);
        sum.insert(sum.end(), out.begin(), out.end());
        return sum;
    });
    same_bits("round_to_bf16 and add_sum_of_bf16", tables, [&](const Compute& on) {
        std::vector<uint16_t> rounded(n);
        on.round_to_bf16(x.data(), n, rounded.data());
        const uint16_t* both[] = {rounded.data(), rounded.data()};
        Floats sum(n);
        on.add_sum_of_bf16(sum.data(), both, 2, n);
        for (uint32_t i = 0; i < n; ++i) {
            if (sum[i] != 2 * bf16(rounded[i]) ||
                std::fabs(sum[i] / 2 - x[i]) > std::fabs(x[i]) / 256) {
                fail("round_to_bf16", "every instruction set, from the right result,");
            }
        }
        return sum;
    });
    same_bits("peak", tables, [&](const Compute& on) {
        Floats with_nan = x;
        with_nan[n / 2] = NAN;
        const Peak peak = on.peak(x.data(), n), other = on.peak(with_nan.data(), n);
        if (peak.has_nan || !other.has_nan || x[peak.index] != peak.value) fail("peak", on.name);
        return Floats{peak.value, static_cast<float>(peak.index)};
    });
    // A NaN stays one, alone or among numbers.
    same_bits("swiglu of NaN", tables, [&](const Compute& on) {
        Floats gates = x, out(n);
        gates[n / 2] = NAN;
        on.swiglu(gates.data(), y.data(), n, out.data());
        for (uint32_t i = 0; i < n; ++i) {
            if (std::isnan(out[i]) != (i == n / 2)) fail("swiglu of NaN", on.name);
        }
        return out;
    });
    // silu of large and small gates: exp at its ends.
    const Floats gates = {-200, -88, -87, -1e-3f, 0, 1e-3f, 87, 88, 89, 200}, ones(10, 1);
    same_bits("swiglu", tables, [&](const Compute& on) {
        Floats out(10);
        on.swiglu(gates.data(), ones.data(), 10, out.data());
        for (int i = 0; i < 10; ++i) {
            const double right = gates[i] / (1 + std::exp(-double{gates[i]}));
            if (!(std::fabs(out[i] - right) <= 1e-6 * std::fabs(right) + 1e-36)) {
                fail("swiglu", "every instruction set, from the right result,");
            }
        }
        return out;
    });
}

void attention(const std::vector<const Compute*>& tables, uint32_t head_dim, uint32_t end,
               uint32_t window) {
    const uint32_t last = end + kQueries;
    const uint64_t stride = padded(last);
    const Floats queries = random_floats(size_t{kQueries} * head_dim);
    const Floats keys = random_floats(stride * head_dim);
    const Floats values = random_floats(stride * padded(head_dim));
    const Keys all = {keys.data(), values.data(), head_dim, 0.3f, stride};
    // The outputs of `num` queries from the first-th on, each of which sees one position more.
    const auto run = [&](const Compute& on, const Floats& of, int first, int num, const Keys& to) {
        Floats scores(kQueries * stride, 7), out(size_t(num) * head_dim);
        Query some[kQueries];
        for (int q = 0; q < num; ++q) {
            const uint32_t own = end + first + q;
            some[q] = {of.data() + (first + q) * head_dim, out.data() + q * head_dim,
                       own > window ? own - window : 0, own};
        }
        on.attend(some, num, to, scores.data());
        return out;
    };
    const auto one_by_one = [&](const Compute& on) {
        Floats out;
        for (int q = 0; q < kQueries; ++q) {
            const Floats one = run(on, queries, q, 1, all);
            out.insert(out.end(), one.begin(), one.end());
        }
        return out;
    };
    same_bits("attend", tables, one_by_one);
    const Floats expected = one_by_one(*tables[0]);
    for (int num = 2; num <= kQueries; ++num) {
        same_bits("attend of a few queries", tables, [&](const Compute& on) {
            const Floats found = run(on, queries, 0, num, all);
            if (memcmp(found.data(), expected.data(), found.size() * sizeof(float)) != 0) {
                fail("attend of a few queries, from one by one,", on.name);
            }
            return found;
        });
    }
    // A query that is NaN makes its own output NaN, and no number of it.
    same_bits("attend to NaN", tables, [&](const Compute& on) {
        Floats wrong = queries;
        wrong[head_dim / 2] = NAN;
        const Floats out = run(on, wrong, 0, kQueries, all);
        for (uint32_t i = 0; i < out.size(); ++i) {
            if (std::isnan(out[i]) != (i < head_dim)) fail("attend to NaN", on.name);
        }
        return Floats{};
    });
    // Nor does it reach a query that does not see its position, though others do.
    for (uint32_t q = 0; q < kQueries; ++q) {
        const uint32_t own = end + q, seen_from = own > window ? own - window : 0;
        Floats wrong(values.size(), NAN);
        const uint32_t row = padded(head_dim);
        std::copy(values.begin() + seen_from * row, values.begin() + own * row,
                  wrong.begin() + seen_from * row);
        same_bits("attend beside NaN", tables, [&](const Compute& on) {
            const Floats out =
                run(on, queries, 0, kQueries, {keys.data(), wrong.data(), head_dim, 0.3f, stride});
            if (memcmp(&out[q * head_dim], &expected[q * head_dim], head_dim * sizeof(float))) {
                fail("attend beside NaN", on.name);
            }
            return Floats{};
        });
    }
    same_bits("rotate", tables, [&](const Compute& on) {
        Floats x = queries;
        on.rotate(x.data(), keys.data(), values.data(), head_dim);
        return x;
    });
}

}  // namespace

int main(int argc, char**) {
    const bool few = argc > 1;
    using Sizes = std::vector<uint32_t>;
    std::vector<const Compute*> tables = {&kComputeBaseline};
#if defined(__x86_64__) && !defined(ONLY_BASELINE)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        tables.push_back(&kComputeV3);
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
        tables.push_back(&kComputeV4);
        if (__builtin_cpu_supports("avx512vnni")) tables.push_back(&kComputeVnni);
    }
#endif
    const Known formats[] = {{number_of("bfloat16"), bf16}, {number_of("float16"), float16}};
    for (const Known& known : formats) all_values(known);
    for (const uint32_t num_columns : few ? Sizes{1, 33} : Sizes{1, 2, 33, 200}) {
        for (int num_panels = 1; num_panels <= kPanels; ++num_panels) {
            for (const Known& known : formats) products(tables, known, num_columns, num_panels);
        }
    }
    const StoredBlocks of_blocks[] = {
        {"q8_0", 32, {0}},
        {"q4_0", 32, {0}},
        {"q4_1", 32, {0, 2}},
        {"q5_0", 32, {0}},
        {"q5_1", 32, {0, 2}},
        {"q4_k", 256, {0, 2}},
        {"q5_k", 256, {0, 2}},
        {"q6_k", 256, {208}},
        {"q4_k_64", 64, {0, 2}, 8, 15},
        {"q5_k_64", 64, {0, 2}, 8, 31},
        {"q6_k_64", 64, {0}, 6, 63},
        {"mxfp4", 32, {}, ~uint64_t{0}, 255, true},
    };
    for (const StoredBlocks& stored : of_blocks) {
        for (const uint32_t num_blocks : few ? Sizes{2} : Sizes{1, 2, 7}) {
            for (const uint32_t num_rows : few ? Sizes{40} : Sizes{1, 16, 40}) {
                blocks(tables, stored, num_blocks * stored.columns, num_rows);
            }
        }
    }
    powers_of_two(tables);
    widened_groups();
    for (const char* name : {"e4m3", "int8", "int8_zeros", "int4", "int4_zeros", "nvfp4"}) {
        for (const uint32_t columns : {32u, 64u, 128u}) {
            // Few formats have groups of 64.
            if (columns == 64 && strncmp(name, "int4", 4) != 0) continue;
            const std::string full = std::string(name) + "_" + std::to_string(columns);
            for (const uint32_t num_rows : few ? Sizes{40} : Sizes{1, 16, 40}) {
                groups(tables, full.c_str(), columns, 1, num_rows);
                groups(tables, full.c_str(), columns, 3, num_rows);
            }
        }
    }
    for (const uint32_t n : few ? Sizes{17, 70} : Sizes{1, 15, 16, 17, 70, 1000}) {
        elementwise(tables, n);
    }
    for (const uint32_t head_dim : few ? Sizes{10, 64} : Sizes{2, 10, 64, 96}) {
        for (const uint32_t end : few ? Sizes{17} : Sizes{1, 14, 17, 150}) {
            for (const uint32_t window : few ? Sizes{3, 1000} : Sizes{1, 3, 100, 1000}) {
                attention(tables, head_dim, end, window);
            }
        }
    }
    for (const Compute* each : tables) printf("%s\n", each->name);
    printf("%016llx\n", static_cast<unsigned long long>(all_bits));
}
