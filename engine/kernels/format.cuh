// The formats of a model's products, in kernels/formats/: one file each, the twin of
// engine/formats/NAME.py. A format F is a struct without members:
//
//   F::Operand                     the element type that the matrix unit multiplies (mma.cuh); the
//                                  vector is split into two parts of it
//   F::kTileBytes                  of a packed tile of 16 x 16 values: values, and scales if it has
//   F::Stored                      this thread's part of a packed tile, in registers
//   F::load(lane, tile)            loads it from shared or global memory; lane: Mma<Operand>::Lane
//   F::streamed(lane, tile)        the same of a tile in global memory that is read once
//   F::operand(stored)             what Mma<Operand>::multiply() takes
//   F::pack(tile, rows, row, first, columns, num)
//                                  packs the tile of 16 rows from `row` on and 16 values of each
//                                  from `first` on. `rows`: as they are stored, `columns` values
//                                  each. num: 16; 0: the tile gets zeros. All threads of a warp
//   F::four(rows, i)               values 4 i to 4 i + 3 of a table that lies as it is stored
//
// S::Formats lists the formats of the model's products, each once. M::Format is one product's.
#pragma once

#include "mma.cuh"

namespace kccl::decode {

// Tells whether two types are the same.
template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

KCCL_CONSTEXPR uint32_t common_divisor(uint32_t a, uint32_t b) {
    while (b != 0) {
        const uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

template <class FIRST, class... REST>
struct FormatList {
    using First = FIRST;
    static constexpr bool kIsOne = sizeof...(REST) == 0;
    KCCL_CONSTEXPR static uint32_t most_bytes() {
        uint32_t most = FIRST::kTileBytes;
        ((most = REST::kTileBytes > most ? REST::kTileBytes : most), ...);
        return most;
    }
    // Packed tiles lie at multiples of this. Slots are counted in it: with one format in tiles.
    KCCL_CONSTEXPR static uint32_t unit_bytes() {
        uint32_t unit = FIRST::kTileBytes;
        ((unit = common_divisor(unit, REST::kTileBytes)), ...);
        return unit;
    }
    KCCL_CONSTEXPR static uint32_t most_words() {
        uint32_t most = sizeof(typename FIRST::Stored);
        ((most = sizeof(typename REST::Stored) > most ? sizeof(typename REST::Stored) : most), ...);
        return (most + 3) / 4;
    }
    static constexpr bool kHaveOneSize =
        ((REST::kTileBytes == FIRST::kTileBytes &&
          sizeof(typename REST::Stored) == sizeof(typename FIRST::Stored)) &&
         ...);
};

template <class S>
constexpr uint32_t kMostTileBytes = S::Formats::most_bytes();
template <class S>
constexpr uint32_t kUnitBytes = S::Formats::unit_bytes();

// This thread's part of a tile in any of the model's formats.
template <class S, bool IS_ONE = S::Formats::kIsOne>
struct Held {
    using Stored = typename S::Formats::First::Stored;
    template <class F>
    KCCL_DECODE const Stored& as() const {
        return stored;
    }
    template <class F>
    KCCL_DECODE void hold(const Stored& part) {
        stored = part;
    }
    Stored stored;
};
template <class S>
struct Held<S, false> {
    template <class F>
    KCCL_DECODE typename F::Stored as() const {
        struct Words {
            uint32_t word[sizeof(typename F::Stored) / sizeof(uint32_t)];
        } words;
        KCCL_UNROLL
        for (uint32_t i = 0; i < sizeof(words) / sizeof(uint32_t); ++i) words.word[i] = word[i];
        return platform::bit_cast<typename F::Stored>(words);
    }
    template <class F>
    KCCL_DECODE void hold(const typename F::Stored& part) {
        struct Words {
            uint32_t word[sizeof(typename F::Stored) / sizeof(uint32_t)];
        };
        const auto words = platform::bit_cast<Words>(part);
        KCCL_UNROLL
        for (uint32_t i = 0; i < sizeof(words) / sizeof(uint32_t); ++i) word[i] = words.word[i];
    }
    uint32_t word[S::Formats::most_words()];
};

}  // namespace kccl::decode
