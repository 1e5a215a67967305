// Compares what functions give on several instruction sets.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "engine/host/compute.h"

namespace {

using namespace kccl::engine;
using Floats = std::vector<float>;

std::mt19937 rng(1);

// Nearly normal: sums of four numbers of 16 bits. Why not std::normal_distribution: each C++
// library has its own.
Floats random_floats(size_t n, float scale = 1) {
    Floats x(n);
    for (float& each : x) {
        const uint32_t a = rng(), b = rng();
        const uint32_t sum = (a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff);
        each = (static_cast<float>(sum) - 2 * 65535.0f) * (scale * 0x1p-15f);
    }
    return x;
}

// FNV-1a of all results. CPUs differ in which NaN they make.
uint64_t all_bits = 0xcbf29ce484222325;
void add_bits(const Floats& results) {
    for (const float each : results) {
        uint32_t bits;
        memcpy(&bits, &each, sizeof(bits));
        all_bits = (all_bits ^ (std::isnan(each) ? 0x7fc00000 : bits)) * 0x100000001b3;
    }
}

void fail(const char* what, const char* where) {
    printf("%s differs on %s\n", what, where);
    exit(1);
}

// Runs f on every table and compares what it gives with what the baseline gives.
void same_bits(const char* what, const std::vector<const Compute*>& tables,
               const std::function<Floats(const Compute&)>& f) {
    const Floats expected = f(*tables[0]);
    add_bits(expected);
    for (const Compute* each : tables) {
        const Floats found = f(*each);
        if (memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) != 0) {
            fail(what, each->name);
        }
    }
}

uint32_t number_of(const char* name) {
    for (uint32_t i = 0; i < kNumFormats; ++i) {
        if (strcmp(kFormats[i].name, name) == 0) return i;
    }
    fail(name, "the table of formats");
    return 0;
}

}  // namespace
