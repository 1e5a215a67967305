// The formats of weights with a scale for a group of columns, on every instruction set of this CPU.
#pragma once

#include <algorithm>

#include "same_bits.h"

namespace {

// A format of groups of `columns` columns: all weights, with random scales and zero points. NVFP4
// has scales for 16 columns besides.
void groups(const std::vector<const Compute*>& tables, const char* name, uint32_t columns,
            uint32_t num_groups, uint32_t num_rows) {
    const uint32_t format = number_of(name), num_columns = columns * num_groups;
    const FormatOf& of = kFormats[format];
    const bool is_float = strncmp(name, "e4m3", 4) == 0,
               has_small_zeros = strstr(name, "int4_zeros") != nullptr;
    const uint32_t num_scales = strncmp(name, "nvfp4", 5) == 0 ? columns / 16 : 0;
    const uint64_t row_bytes = of.stored_bytes(num_columns), group_bytes = row_bytes / num_groups;
    std::vector<uint8_t> rows(row_bytes * num_rows);
    for (uint8_t& each : rows) {
        each = static_cast<uint8_t>(rng());
        if (is_float && (each & 0x7f) == 0x7f) each ^= 1;  // NaN
    }
    for (uint64_t at = 0; at < rows.size(); at += group_bytes) {
        const float scale = std::fabs(random_floats(1)[0]) + 0.1f;
        memcpy(&rows[at], &scale, sizeof(scale));
        if (has_small_zeros) rows[at + sizeof(scale)] %= 16;
        for (uint32_t i = 0; i < num_scales; ++i) rows[at + sizeof(scale) + i] %= 0x7f;
    }
    const auto num_panels = static_cast<int>((num_rows + kRows - 1) / kRows);
    std::vector<uint8_t> panels(of.panel_bytes(num_columns) * num_panels);
    kccl_engine_pack(format, panels.data(), rows.data(), num_rows, num_columns, 1);
    // Groups of digits of usual size, large, tiny, and zeros.
    Floats x = random_floats(uint64_t{num_columns} * kGroup);
    for (uint64_t i = 0; i < x.size(); ++i) {
        const float scales[] = {1, 1e6f, 1e-20f, 0, -3e20f};
        x[i] *= scales[i / 32 % 5];
    }
    const uint64_t num_digits = num_columns / kDigitGroup;
    const auto run = [&](const Compute& on, const Floats& vectors, int num) {
        std::vector<DigitGroup> digits(num_digits * kGroup);
        const float* prepared = vectors.data();
        uint64_t stride = num_columns;
        if (on.prepare[format] != nullptr) {
            for (int c = 0; c < num; ++c) {
                on.prepare[format](&vectors[uint64_t{num_columns} * c], num_columns,
                                   &digits[num_digits * c]);
            }
            prepared = reinterpret_cast<const float*>(digits.data());
            stride = num_digits * (sizeof(DigitGroup) / sizeof(float));
        }
        Floats out(size_t{kGroup} * kPanels * kRows), found;
        on.multiply[format](panels.data(), num_panels, num_columns / 2, prepared, stride, num,
                            out.data());
        for (int c = 0; c < num; ++c) {
            const float* column = &out[size_t(c) * kPanels * kRows];
            found.insert(found.end(), column, column + num_rows);
        }
        return found;
    };
    const Floats all = run(*tables[0], x, kGroup);
    for (int num = 1; num <= kGroup; ++num) {
        same_bits(name, tables, [&](const Compute& on) {
            const Floats found = run(on, x, num);
            if (memcmp(found.data(), all.data(), found.size() * sizeof(float)) != 0) {
                fail("a few columns of a format of groups", on.name);
            }
            return found;
        });
    }
    Floats weights(num_columns);
    for (uint32_t row = 0; row < num_rows; ++row) {
        of.widen(&rows[row * row_bytes], num_columns, weights.data());
        for (int c = 0; c < kGroup; ++c) {
            const float* column = &x[uint64_t{num_columns} * c];
            double sum = 0, size = 0;
            for (uint32_t k = 0; k < num_columns; ++k) {
                float most = 0, of_scale = 0;
                memcpy(&of_scale, &rows[row * row_bytes + k / columns * group_bytes], 4);
                for (uint32_t i = k / 32 * 32; i < k / 32 * 32 + 32; ++i) {
                    most = std::max(most, std::fabs(column[i]));
                }
                sum += double{weights[k]} * column[k];
                size += std::max(double{of_scale}, double{std::fabs(weights[k])}) * most;
            }
            if (std::fabs(all[c * num_rows + row] - sum) > 1e-6 * size) {
                fail(name, "every instruction set, from the right result,");
            }
        }
    }
    // A number that is not finite reaches the sums of its column only.
    Floats with_nan = x;
    with_nan[num_columns - 1] = NAN;
    same_bits("groups of NaN", tables, [&](const Compute& on) {
        const Floats found = run(on, with_nan, 2);
        for (uint32_t i = 0; i < 2 * num_rows; ++i) {
            if (std::isnan(found[i]) != (i < num_rows)) fail("groups of NaN", on.name);
        }
        return Floats{};
    });
}

// What a row of a table means: every e4m3 number, and integers less every zero point.
void widened_groups() {
    uint8_t row[4 + 128];
    const float scale = 0.75f;
    memcpy(row, &scale, sizeof(scale));
    for (uint32_t first = 0; first < 256; first += 128) {
        float found[128];
        for (uint32_t i = 0; i < 128; ++i) row[4 + i] = static_cast<uint8_t>(first + i);
        kFormats[number_of("e4m3_128")].widen(row, 128, found);
        for (uint32_t i = 0; i < 127; ++i) {
            const auto exponent = static_cast<int>(i >> 3);
            const auto mantissa = static_cast<float>(i & 7);
            const float size =
                exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(mantissa + 8, exponent - 10);
            if (found[i] != (first == 0 ? size : -size) * scale) fail("widen", "e4m3");
        }
    }
    uint8_t block[5 + 16];
    memcpy(block, &scale, sizeof(scale));
    for (uint32_t zero = 0; zero <= 15; ++zero) {
        block[4] = static_cast<uint8_t>(zero);
        for (uint32_t i = 0; i < 16; ++i) block[5 + i] = static_cast<uint8_t>(i | (15 - i) << 4);
        float found[32];
        kFormats[number_of("int4_zeros_32")].widen(block, 32, found);
        for (uint32_t i = 0; i < 32; ++i) {
            const auto integer = static_cast<float>(i < 16 ? i : 31 - i);
            if (found[i] != (integer - static_cast<float>(zero)) * scale) fail("widen", "integers");
        }
    }
    // 4-bit floats: each number, with scales of 2 and 0.5 for 16 columns.
    uint8_t floats[4 + 2 + 16] = {0, 0, 0, 0, 0x40, 0x30};
    memcpy(floats, &scale, sizeof(scale));
    for (uint32_t i = 0; i < 16; ++i) floats[6 + i] = static_cast<uint8_t>(i * 17);
    float found[32];
    kFormats[number_of("nvfp4_32")].widen(floats, 32, found);
    const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (uint32_t i = 0; i < 32; ++i) {
        const float number = (i % 16 < 8 ? 1.0f : -1.0f) * sizes[i % 8];
        if (found[i] != number * (i < 16 ? 2.0f : 0.5f) * scale) fail("widen", "4-bit floats");
    }
}

}  // namespace
