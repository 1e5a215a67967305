// The formats of weights that are integers in blocks, on every instruction set of this CPU.
#pragma once

#include <algorithm>

#include "same_bits.h"

namespace {

// A format of blocks of integers, and where a block has FP16 numbers. If integers have a byte each,
// they begin at bytes_at and are at most `most`. If a block begins with the exponent of a power of
// two, is_power.
struct StoredBlocks {
    const char* name;
    uint32_t columns;
    std::vector<uint64_t> halves_at;
    uint64_t bytes_at = ~uint64_t{0};
    uint8_t most = 255;
    bool is_power = false;
};

// Every integer, with random scales.
void blocks(const std::vector<const Compute*>& tables, const StoredBlocks& stored,
            uint32_t num_columns, uint32_t num_rows) {
    const char* name = stored.name;
    const uint32_t format = number_of(name);
    const FormatOf& of = kFormats[format];
    const uint64_t row_bytes = of.stored_bytes(num_columns);
    const uint64_t block_bytes = row_bytes / (num_columns / stored.columns);
    std::vector<uint8_t> rows(row_bytes * num_rows);
    for (uint8_t& each : rows) each = static_cast<uint8_t>(rng());
    // The last row has the largest integers, with small scales, so that no sum leaves FP32.
    // E2M1's code 7 is its largest integer.
    std::fill(rows.end() - static_cast<int64_t>(row_bytes), rows.end(),
              stored.is_power ? 0x77 : 255);
    for (uint64_t block = 0; block < rows.size(); block += block_bytes) {
        // FP16 numbers of -2 to 2, in the last row below 1/8.
        const bool is_last = block >= rows.size() - row_bytes;
        for (const uint64_t at : stored.halves_at) rows[block + at + 1] &= is_last ? 0x2f : 0xbf;
        // Powers of 2^-4 to 2^3.
        if (stored.is_power) rows[block] = static_cast<uint8_t>(123 + rows[block] % 8);
        for (uint64_t at = stored.bytes_at; at < block_bytes; ++at) rows[block + at] &= stored.most;
    }
    const auto num_panels = static_cast<int>((num_rows + kRows - 1) / kRows);
    std::vector<uint8_t> panels(of.panel_bytes(num_columns) * num_panels);
    kccl_engine_pack(format, panels.data(), rows.data(), num_rows, num_columns, 1);
    // Groups of usual size, large, tiny, and zeros; the largest number of some has all bits set.
    Floats x = random_floats(uint64_t{num_columns} * kGroup);
    for (uint64_t i = 0; i < x.size(); ++i) {
        const float scales[] = {1, 1e6f, 1e-30f, 0, -3e32f};
        x[i] *= scales[i / 32 % 5];
        if (i % 96 == 5) x[i] = i % 64 == 5 ? 1.9999999f : -1.9999999f;
        // The digits -126, -128, -128: the largest sums.
        if (i / 32 % 8 == 1) x[i] = -0x7e8080 * 0x1p-22f;
    }
    const uint64_t num_groups = num_columns / 32;
    const auto run = [&](const Compute& on, const Floats& columns, int num) {
        std::vector<DigitGroup> digits(num_groups * kGroup);
        for (int c = 0; c < num; ++c) {
            on.prepare[format](&columns[uint64_t{num_columns} * c], num_columns,
                               &digits[num_groups * c]);
        }
        Floats out(size_t{kGroup} * kPanels * kRows), found;
        on.multiply[format](panels.data(), num_panels, num_columns / 2,
                            reinterpret_cast<const float*>(digits.data()),
                            num_groups * (sizeof(DigitGroup) / sizeof(float)), num, out.data());
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
                fail("a few columns of a format of blocks", on.name);
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
                float most = 0;
                for (uint32_t i = k / 32 * 32; i < k / 32 * 32 + 32; ++i) {
                    most = std::max(most, std::fabs(column[i]));
                }
                sum += double{weights[k]} * column[k];
                size += std::max(1.0, double{std::fabs(weights[k])}) * most;
            }
            if (std::fabs(all[c * num_rows + row] - sum) > 1e-6 * size) {
                fail(name, "every instruction set, from the right result,");
            }
        }
    }
    // A number that is not finite makes every sum of its column NaN.
    for (const float wrong : {NAN, INFINITY, -INFINITY}) {
        Floats with_nan = x;
        with_nan[num_columns - 1] = wrong;
        same_bits("blocks of NaN", tables, [&](const Compute& on) {
            const Floats found = run(on, with_nan, 2);
            for (uint32_t i = 0; i < 2 * num_rows; ++i) {
                if (std::isnan(found[i]) != (i < num_rows)) fail("blocks of NaN", on.name);
            }
            return Floats{};
        });
    }
}

// Every number of MXFP4 with every scale, as rows of a table have it and as a product with 1 does.
// Some are subnormal, and some are beyond FP32.
void powers_of_two(const std::vector<const Compute*>& tables) {
    constexpr uint32_t kScales = 255, kColumns = 32, kStoredBytes = 17;
    const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const uint32_t format = number_of("mxfp4");
    const FormatOf& of = kFormats[format];
    std::vector<uint8_t> rows(kScales * kStoredBytes);
    Floats expected(kScales * kColumns), widened(kScales * kColumns);
    for (uint32_t row = 0; row < kScales; ++row) {
        uint8_t* block = &rows[row * kStoredBytes];
        block[0] = static_cast<uint8_t>(row);
        for (uint32_t k = 0; k < kColumns; ++k) {
            const uint32_t number = (k + row) % 16;
            block[1 + k % 16] |= number << k / 16 * 4;
            const float size = number < 8 ? sizes[number] : -sizes[number - 8];
            expected[row * kColumns + k] = std::ldexp(size, static_cast<int>(row) - 127);
        }
    }
    of.widen(rows.data(), kScales * kColumns, widened.data());
    if (widened != expected) fail("widen", "mxfp4");
    std::vector<uint8_t> panels(of.panel_bytes(kColumns) * ((kScales + kRows - 1) / kRows));
    kccl_engine_pack(format, panels.data(), rows.data(), kScales, kColumns, 1);
    for (uint32_t k = 0; k < kColumns; ++k) {
        Floats one(kColumns);
        one[k] = 1;
        same_bits("powers of two", tables, [&](const Compute& on) {
            DigitGroup digits;
            on.prepare[format](one.data(), kColumns, &digits);
            Floats found;
            for (uint32_t row = 0; row < kScales; row += kRows) {
                Floats out(kPanels * kRows);
                on.multiply[format](&panels[row / kRows * of.panel_bytes(kColumns)], 1,
                                    kColumns / 2, reinterpret_cast<const float*>(&digits),
                                    sizeof(digits) / sizeof(float), 1, out.data());
                found.insert(found.end(), out.begin(), out.begin() + kRows);
            }
            for (uint32_t row = 0; row < kScales; ++row) {
                if (found[row] != expected[row * kColumns + k]) fail("powers of two", on.name);
            }
            return found;
        });
    }
}

}  // namespace
