// Makes the noise of sampling. It is a function of (seed, position, id) alone, which sample.py
// defines.
#pragma once

#include "math.cuh"

namespace kccl::decode {

// Four random words, as philox() returns them: Philox4x32-10 (Salmon et al., SC 2011) with the key
// `seed`.
struct Philox {
    uint32_t word[4];
};

KCCL_DECODE Philox philox(uint64_t seed, uint32_t counter, uint32_t position) {
    uint32_t a = counter, b = position, c = 0, d = 0;
    auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    KCCL_UNROLL
    for (int turn = 0; turn < 10; ++turn) {
        const uint64_t p = uint64_t{0xD2511F53} * a, q = uint64_t{0xCD9E8D57} * c;
        a = static_cast<uint32_t>(q >> 32) ^ b ^ k0;
        c = static_cast<uint32_t>(p >> 32) ^ d ^ k1;
        b = static_cast<uint32_t>(q);
        d = static_cast<uint32_t>(p);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return {{a, b, c, d}};
}

// Turns a random word into Gumbel noise. sample.py computes it with log1p(-u). Here 1 - u is exact,
// so its logarithm is the same.
KCCL_DECODE double gumbel(uint32_t word) {
    const double u = (word + 0.5) / 4294967296.0;
    return -logarithm(-logarithm(1.0 - u));
}

// Returns a number that gumbel(word) does not exceed. With u as there, -log(1 - u) is larger than
// u, which is at least 2^(e - 32) if the word is at least 2^e. So the noise is less than
// (32 - e) * log(2), and the conversion to float, which may round e up, stays within what 0.7
// adds.
KCCL_DECODE double most_noise(uint32_t word) {
    const auto bits = platform::bit_cast<uint32_t>(static_cast<float>(word));
    return 0.7 * (32 - (static_cast<int32_t>(bits >> 23) - 127));
}

}  // namespace kccl::decode
