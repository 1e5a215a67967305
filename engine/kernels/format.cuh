// The formats of a model's products, in kernels/formats/: one file each, the twin of
// engine/formats/NAME.py. A format F is a struct without members:
//
//   F::Operand                     the element type that the matrix unit multiplies (mma.cuh); the
//                                  vector is split into two parts of it
//   F::kTileBytes                  of a packed tile of 16 x 16 values
//   F::Stored                      this thread's part of a packed tile, in registers
//   F::load(lane, tile)            loads it from shared or global memory; lane: Mma<Operand>::Lane,
//                                  or with scales also a StreamingLane
//   F::streamed(lane, tile)        the same of a tile in global memory that is read once
//   F::operand(stored)             what Mma<Operand>::multiply() takes; with scales, it gets those
//                                  as well
//   F::pack(tile, rows, row, first, columns, num)
//                                  packs the tile of 16 rows from `row` on and 16 values of each
//                                  from `first` on. `rows`: as they are stored, `columns` values
//                                  each. num: 16; 0: the tile gets zeros. All threads of a warp
//   F::four(rows, i)               values 4 i to 4 i + 3 of a table that lies as it is stored
//   F::kStripTiles                 the tiles of a strip, which follow each other in a warp's
//                                  part of the columns
//   F::kScaleBytes                 of the scales behind the tiles of a strip; 0: it has none
//   F::kHasMinimums                whether weights are (integer x scale - minimum). Formats without
//                                  scales have false
//
// With scales F has more, and streamed() is not used:
//
//   F::Scales                      this thread's part of a strip's scales. Its member `factors` is
//                                  what Mma<Operand>::add_scaled() takes
//   F::scales(lane, scales)        loads this thread's part of a strip's scales
//   F::pack_scales(scales, rows, row, first, columns, num)
//                                  packs them, as pack() does the strip's first tile
//
// With minimums F has these in place of Scales::factors:
//
//   F::kScaledTiles, kLoweredTiles the tiles of a strip that share a scale, and a minimum
//   F::scale(scales, i)            what add_scaled() takes for the sums of scale i of a strip
//   F::minimum(scales, i)          the same for sums of the vector itself, over minimum i's columns
//   F::ones()                      a tile of ones, whose products make these sums
//   F::skip(scales, tiles)         drops the scales and minimums of a strip's first tiles
//
// The products of a strip with scales have sums of their own, one for each chain of
// ChainOf<F>::kTiles tiles. These are multiplied by the scales, and added up. So scales never
// multiply weights, which would round them.
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

KCCL_CONSTEXPR uint32_t least_of(uint32_t a, uint32_t b) { return a < b ? a : b; }
KCCL_CONSTEXPR uint32_t common_divisor(uint32_t a, uint32_t b) {
    while (b != 0) {
        const uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

template <class F>
constexpr bool kHasScales = F::kScaleBytes != 0;
// The most tiles of a chain. Chains are short, because each of their products waits for the one
// before it. Another length gives other bits.
constexpr uint32_t kMostOfChain = 4;
template <class F>
constexpr uint32_t kChainTiles = F::kStripTiles < kMostOfChain ? F::kStripTiles : kMostOfChain;
// A scale of kScaledTiles needs a chain of its own.
template <class F, bool HAS_MINIMUMS = F::kHasMinimums>
struct ChainOf {
    static constexpr uint32_t kTiles = kChainTiles<F>;
};
template <class F>
struct ChainOf<F, true> {
    static constexpr uint32_t kTiles = F::kScaledTiles;
};
template <class F>
constexpr uint32_t kStripBytes = F::kStripTiles * F::kTileBytes + F::kScaleBytes;
// The bytes of a tile with its share of the strip's scales.
template <class F>
constexpr uint32_t kTileBytesOf = kStripBytes<F> / F::kStripTiles;

// This thread's part of a strip.
template <class F, bool HAS_SCALES = kHasScales<F>>
struct Strip {
    static_assert(F::kStripTiles == 1, "only scales make strips");
    typename F::Stored tiles[1];
};
template <class F>
struct Strip<F, true> {
    typename F::Stored tiles[F::kStripTiles];
    typename F::Scales scales;
};

// Whether a strip has two tiles, whose words take turns: a thread's words of both lie together, and
// one instruction loads them. They lie as those of a tile with twice as many bits.
template <class F>
constexpr bool kHasTwins = false;

// A strip's two tiles.
template <class F>
struct Twins {
    typename F::Stored tile[2];
};
template <class F, class Lane>
KCCL_DECODE Twins<F> load_twins(const Lane& lane, const uint8_t* strip) {
    return platform::bit_cast<Twins<F>>(lane.template packed<2 * F::kBits>(strip));
}

template <class F, class Lane>
KCCL_DECODE Strip<F> load_strip(const Lane& lane, const uint8_t* from) {
    Strip<F> strip;
    if constexpr (kHasTwins<F>) {
        const Twins<F> both = load_twins<F>(lane, from);
        KCCL_UNROLL
        for (uint32_t i = 0; i < 2; ++i) strip.tiles[i] = both.tile[i];
    } else {
        KCCL_UNROLL
        for (uint32_t i = 0; i < F::kStripTiles; ++i) {
            strip.tiles[i] = F::load(lane, from + i * F::kTileBytes);
        }
    }
    if constexpr (kHasScales<F>) {
        strip.scales = F::scales(lane, from + F::kStripTiles * F::kTileBytes);
    }
    return strip;
}

// The sums of a row tile: those of the matrix unit, or those that scales have multiplied.
template <class F, bool HAS_SCALES = kHasScales<F>>
struct SumsOf {
    using Type = typename Mma<typename F::Operand>::Sums;
};
template <class F>
struct SumsOf<F, true> {
    using Type = typename Mma<typename F::Operand>::Scaled;
};

// The products of NUM strips with scales that follow each other.
template <class F, uint32_t NUM>
class Chains {
    using Unit = Mma<typename F::Operand>;

  public:
    // input(i): that of the strips' i-th tile.
    template <class Input>
    KCCL_DECODE Chains(const Strip<F>* strips, Input input) {
        // All inputs are loaded before the first product, which else would wait for its own.
        typename Unit::Inputs inputs[NUM * F::kStripTiles];
        KCCL_UNROLL
        for (uint32_t i = 0; i < NUM * F::kStripTiles; ++i) inputs[i] = input(i);
        // The chains take turns, because a product waits for the one before it of the same chain.
        KCCL_UNROLL
        for (uint32_t i = 0; i < kOfChain; ++i) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < NUM * kOfStrip; ++k) {
                const Strip<F>& strip = strips[k / kOfStrip];
                const auto& tile = strip.tiles[k % kOfStrip * kOfChain + i];
                Unit::multiply(chains_[k], F::operand(tile, strip.scales),
                               inputs[k * kOfChain + i]);
            }
        }
    }

    // Adds strip i to the sums of its row tile.
    KCCL_DECODE void add(typename Unit::Scaled& sums, const Strip<F>& strip, uint32_t i) const {
        KCCL_UNROLL
        for (uint32_t k = 0; k < kOfStrip; ++k) {
            Unit::add_scaled(sums, chains_[i * kOfStrip + k], strip.scales.factors);
        }
    }

  private:
    static constexpr uint32_t kOfChain = kChainTiles<F>, kOfStrip = F::kStripTiles / kOfChain;
    typename Unit::Sums chains_[NUM * kOfStrip] = {};
};

// Means that no sums of the vector are known: LateChains makes them, as products with ones.
struct NoKnownSums {};

// The tiles of a strip that LateChains multiplies at a time.
template <class F>
constexpr uint32_t kLateTiles = least_of(F::kStripTiles, 4);

// With minimums a strip has more chains than a thread has registers. So a few tiles are multiplied
// at a time, with inputs that are loaded then, when their strip is added. Prefill adds the chains
// in the same order. input(i): as Chains takes it. known(i): the sums of the vector over the
// columns of the strips' i-th minimum, which have the bits of a product with ones.
template <class F, class Input, class Known = NoKnownSums>
class LateChains {
    using Unit = Mma<typename F::Operand>;

  public:
    KCCL_DECODE explicit LateChains(const Input& input, const Known& known = {})
        : input_(input), known_(known) {}

    // The products of kAtOnce tiles.
    static constexpr uint32_t kAtOnce = kLateTiles<F>;
    static constexpr uint32_t kScaled = F::kScaledTiles, kLowered = F::kLoweredTiles;
    struct Some {
        typename Unit::Sums products[kAtOnce / kScaled] = {}, inputs[kAtOnce / kLowered] = {};
    };

    KCCL_DECODE void add(typename Unit::Scaled& sums, const Strip<F>& strip, uint32_t i) const {
        KCCL_UNROLL
        for (uint32_t first = 0; first < F::kStripTiles; first += kAtOnce) {
            Some some;
            multiply(some, strip, i, first);
            add_some(sums, some, strip, first);
        }
    }

    // Multiplies the tiles of strip i from `first` on.
    KCCL_DECODE void multiply(Some& some, const Strip<F>& strip, uint32_t i, uint32_t first) const {
        static_assert(kLowered % kScaled == 0, "a minimum has whole scales");
        // The minimums' tiles take turns, because a product waits for the one before it of the
        // same chain.
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            constexpr uint32_t kTurns = kAtOnce / kLowered;
            const uint32_t tile = k % kTurns * kLowered + k / kTurns;
            const auto input = input_(i * F::kStripTiles + first + tile);
            Unit::multiply(some.products[tile / kScaled],
                           F::operand(strip.tiles[first + tile], strip.scales), input);
            if constexpr (!kIsKnown) Unit::multiply(some.inputs[tile / kLowered], F::ones(), input);
        }
        if constexpr (kIsKnown) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kAtOnce / kLowered; ++k) {
                some.inputs[k] = known_((i * F::kStripTiles + first) / kLowered + k);
            }
        }
    }
    // Adds them to the sums of their row tile.
    KCCL_DECODE void add_some(typename Unit::Scaled& sums, const Some& some, const Strip<F>& strip,
                              uint32_t first) const {
        KCCL_UNROLL
        for (uint32_t tile = 0; tile < kAtOnce; ++tile) {
            if ((tile + 1) % kScaled == 0) {
                Unit::add_scaled(sums, some.products[tile / kScaled],
                                 F::scale(strip.scales, (first + tile) / kScaled));
            }
            if ((tile + 1) % kLowered == 0) {
                Unit::add_scaled(sums, some.inputs[tile / kLowered],
                                 F::minimum(strip.scales, (first + tile) / kLowered));
            }
        }
    }

  private:
    static constexpr bool kIsKnown = !kIsSame<Known, NoKnownSums>;
    const Input& input_;
    const Known known_;
};

// Returns the chains of NUM strips that follow each other. They use `input` while they live.
template <class F, uint32_t NUM, class Input>
KCCL_DECODE auto chains_of(const Strip<F>* strips, const Input& input) {
    if constexpr (F::kHasMinimums) {
        return LateChains<F, Input>(input);
    } else {
        return Chains<F, NUM>(strips, input);
    }
}

// Adds the products of NUM strips that follow each other. input(i): that of their i-th tile.
template <class F, uint32_t NUM = 1, class Input>
KCCL_DECODE void multiply_strips(typename SumsOf<F>::Type& sums, const Strip<F>* strips,
                                 Input input) {
    if constexpr (kHasScales<F>) {
        const auto chains = chains_of<F, NUM>(strips, input);
        KCCL_UNROLL
        for (uint32_t k = 0; k < NUM; ++k) chains.add(sums, strips[k], k);
    } else {
        KCCL_UNROLL
        for (uint32_t k = 0; k < NUM; ++k) {
            Mma<typename F::Operand>::multiply(sums, F::operand(strips[k].tiles[0]), input(k));
        }
    }
}

template <class FIRST, class... REST>
struct FormatList {
    using First = FIRST;
    static constexpr bool kIsOne = sizeof...(REST) == 0;
    static constexpr bool kHaveMinimums = (FIRST::kHasMinimums || ... || REST::kHasMinimums);
    // The bytes of the smallest tile, without scales.
    KCCL_CONSTEXPR static uint32_t least_bytes() {
        uint32_t least = FIRST::kTileBytes;
        ((least = REST::kTileBytes < least ? REST::kTileBytes : least), ...);
        return least;
    }
    // Packed tiles lie at multiples of this. Slots are counted in it: with one format in tiles.
    KCCL_CONSTEXPR static uint32_t unit_bytes() {
        uint32_t unit = kTileBytesOf<FIRST>;
        ((unit = common_divisor(unit, kTileBytesOf<REST>)), ...);
        return unit;
    }
};

template <class S>
constexpr uint32_t kUnitBytes = S::Formats::unit_bytes();

KCCL_CONSTEXPR uint32_t stage_steps(uint32_t steps, uint32_t least_bytes, uint32_t tile_bytes) {
    const uint32_t most = steps * least_bytes < tile_bytes ? 1 : steps * least_bytes / tile_bytes;
    if (tile_bytes % least_bytes == 0) return most;
    // Other sizes are powers of two apart. A power of two has whole strips.
    uint32_t power = 1;
    while (2 * power <= most) power *= 2;
    return power;
}
// The steps of a stage whose product has format F. With smaller tiles they are more, so that stages
// have about as many bytes.
template <class S, class F>
constexpr uint32_t kStageStepsOf =
    stage_steps(S::kStageSteps, S::Formats::least_bytes(), F::kTileBytes);
template <class S, class F>
constexpr uint32_t kStageStripsOf = kStageStepsOf<S, F> / F::kStripTiles;

template <class S, class FIRST, class... REST>
KCCL_CONSTEXPR uint32_t most_stage_bytes(FormatList<FIRST, REST...>) {
    uint32_t most = kStageStepsOf<S, FIRST> * kTileBytesOf<FIRST>;
    ((most = most < kStageStepsOf<S, REST> * kTileBytesOf<REST>
                 ? kStageStepsOf<S, REST> * kTileBytesOf<REST>
                 : most),
     ...);
    return most;
}
template <class S, class FIRST, class... REST>
KCCL_CONSTEXPR uint32_t most_stage_words(FormatList<FIRST, REST...>) {
    uint32_t most = kStageStripsOf<S, FIRST> * sizeof(Strip<FIRST>);
    ((most = most < kStageStripsOf<S, REST> * sizeof(Strip<REST>)
                 ? kStageStripsOf<S, REST> * sizeof(Strip<REST>)
                 : most),
     ...);
    return (most + 3) / 4;
}

// This thread's part of a stage in any of the model's formats.
template <class S, bool IS_ONE = S::Formats::kIsOne>
struct HeldStage {
    using First = typename S::Formats::First;
    template <class F>
    KCCL_DECODE const Strip<F>& strip(uint32_t i) const {
        return strips[i];
    }
    template <class F>
    KCCL_DECODE void hold(uint32_t i, const Strip<F>& part) {
        strips[i] = part;
    }
    Strip<First> strips[kStageStripsOf<S, First>];
};
template <class S>
struct HeldStage<S, false> {
    template <class F>
    struct Words {
        uint32_t word[sizeof(Strip<F>) / sizeof(uint32_t)];
    };
    template <class F>
    KCCL_DECODE Strip<F> strip(uint32_t i) const {
        constexpr uint32_t kNum = sizeof(Strip<F>) / sizeof(uint32_t);
        Words<F> words;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum; ++k) words.word[k] = word[i * kNum + k];
        return platform::bit_cast<Strip<F>>(words);
    }
    template <class F>
    KCCL_DECODE void hold(uint32_t i, const Strip<F>& part) {
        constexpr uint32_t kNum = sizeof(Strip<F>) / sizeof(uint32_t);
        const auto words = platform::bit_cast<Words<F>>(part);
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum; ++k) word[i * kNum + k] = words.word[k];
    }
    uint32_t word[most_stage_words<S>(typename S::Formats{})];
};

}  // namespace kccl::decode
