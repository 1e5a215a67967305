// The exchange buffer of a rank. Blocks pass vectors to each other in it, as float4s (four FP32
// words, 16 bytes) in which the lowest bit of each word is a flag.
//
// Each vector of a token step has a slot of its own in the buffer. The lowest bit of a word, its
// tag, tells whether the token step that wrote it was even or odd (with several columns, whether
// that use of its column was: see below). A reader polls until all four
// words of a float4 have the tag of the reader's token step. So the data are their own signal, need
// no memory order, and are never cleared. Values lose their lowest bit.
//
// Why a tag of one bit is enough: each word of a vector is written once a token step. All blocks of
// all ranks wait for each other at the end of a token step, and that alone has fences (finish.cuh).
// So all writes of token step r - 1 come before every load of token step r, and such a load finds a
// word of token step r - 1 or r. Without the fences a relaxed load might return a word of token
// step r - 2, which has the same tag.
//
// The control words with which blocks wait for each other at the end of a token step have two
// slots, which take turns, and a tag that changes every other token step. A block may write the
// words of step r + 1 while another still reads the words of step r. But it writes the words of
// step r + 2 only when all blocks have read those of step r.
//
// After that wait, blocks that sample (sample.cuh) exchange further control words. These exchanges
// are numbered through all token steps and requests. Their control words have two slots as well,
// and need no fence. A slot is read by the same thread each time. A thread that has read the word
// of exchange e - 2 cannot find that of e - 4 any more, whose tag is the tag of e. For this, each
// exchange sends the control words of all kinds, even if it needs few. Vectors are ordered by the
// fences at the end of the token step. With seats, each column has such slots and numbers of its
// own, and the thread may change between two token steps (choosers.cuh).
//
// In a kernel where nothing overlaps (S::kOverlaps is false), all blocks also meet behind every op
// (ConsumerWarp::meet_all), in the same way. These meetings are numbered from 0 in each token step.
//
// A token step may run several positions, each in a column of its own (columns.cuh). A column has
// slots of its own, those at the end of a token step included, and counts the token steps that use
// it. Its tags follow from that number: a word of a column that a token step does not use stays as
// it is. So each column that is used sends its control words, even if nobody needs them.
//
// The exchange buffer is zero before token step 0. The tag of that step is 1.
#pragma once

#include "shape.cuh"
#include "task.cuh"

namespace kccl::decode {

// tag_of() returns the tag of a token step's vectors. tag_of_end() returns the tag of the control
// words at its end. It also returns the tag of an exchange of sampling, or of a meeting, with this
// number.
KCCL_CONSTEXPR uint32_t tag_of(uint32_t token_step) { return (token_step & 1u) ^ 1u; }
KCCL_CONSTEXPR uint32_t tag_of_end(uint32_t token_step) { return (token_step >> 1 & 1u) ^ 1u; }

// Returns a value as readers of the exchange buffer get it: without its lowest bit.
KCCL_DECODE float untagged(float value) {
    return platform::bit_cast<float>(platform::bit_cast<uint32_t>(value) & ~1u);
}

KCCL_DECODE Float4 untagged(Float4 four) {
    KCCL_UNROLL
    for (float& value : four.value) value = untagged(value);
    return four;
}

KCCL_DECODE mem::Packet tagged(const Float4& four, uint32_t tag) {
    uint32_t words[4];
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        words[i] = (platform::bit_cast<uint32_t>(four.value[i]) & ~1u) | tag;
    }
    return {{words[0] | uint64_t{words[1]} << 32, words[2] | uint64_t{words[3]} << 32}};
}

// Checks the tags of a packet (the 16 bytes of a float4). Bit 0 of the result is 0 if all four
// words have the tag; its other bits mean nothing. Results of several packets may be ORed and
// tested once.
KCCL_DECODE uint32_t without_tag(mem::Packet packet, uint32_t tag) {
    uint32_t wrong = 0;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i)
        wrong |= static_cast<uint32_t>(packet.half[i / 2] >> i % 2 * 32) ^ tag;
    return wrong;
}

KCCL_DECODE Float4 float4_of(mem::Packet packet) {
    Float4 four;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        const auto word = static_cast<uint32_t>(packet.half[i / 2] >> i % 2 * 32);
        four.value[i] = platform::bit_cast<float>(word & ~1u);
    }
    return four;
}

// A control word: 124 bits that a block sends to all blocks of all ranks, as three words of 32 bits
// and `small` with 28 bits.
struct alignas(16) ControlWord {
    uint32_t word[3];
    uint32_t small;
};

// Turns a control word into a float4 to publish. Publishing replaces the lowest bit of each word by
// the tag. So the lowest bits of the first three words move into the last word, below the 28 bits
// of `small`. control_word_of() turns the float4 back.
KCCL_DECODE Float4 float4_of(const ControlWord& control) {
    Float4 four;
    uint32_t last = control.small << 4;
    KCCL_UNROLL
    for (int i = 0; i < 3; ++i) {
        four.value[i] = platform::bit_cast<float>(control.word[i]);
        last |= (control.word[i] & 1u) << (i + 1);
    }
    four.value[3] = platform::bit_cast<float>(last);
    return four;
}

KCCL_DECODE ControlWord control_word_of(const Float4& four) {
    const auto last = platform::bit_cast<uint32_t>(four.value[3]);
    ControlWord control;
    KCCL_UNROLL
    for (int i = 0; i < 3; ++i) {
        const auto word = platform::bit_cast<uint32_t>(four.value[i]);
        control.word[i] = (word & ~1u) | (last >> (i + 1) & 1u);
    }
    control.small = last >> 4;
    return control;
}

// The kinds of control words that blocks exchange when they sample: candidates.cuh explains them.
enum ControlWordKind : uint32_t {
    kBest,
    kBelow,
    kReached,
    kBefore,
    kFromPivot,
    kAll,
    kNumControlWords
};

// The slots of an exchange buffer: where each vector lies, counted in float4s from the buffer's
// beginning. Modules are counted over all layers, lanes over all ranks.
template <class S>
struct Slots {
    static constexpr uint32_t kVector = S::kHidden / 4;
    static constexpr uint32_t kQkvFloat4s = Shape<S>::kQkvRows / 4;
    static constexpr uint32_t kFfnFloat4s = S::kPlaces * S::kFfn / 4;
    static constexpr uint32_t kPartialsFloat4s =
        S::kHeads * S::kKvSplits * Shape<S>::kPartialFloat4s;  // of a lane
    static constexpr uint32_t kAttendedFloat4s = Shape<S>::kAttendedRows / 4;

    // kResiduals, [module][residual][float4]: the residuals after each module. kMessages,
    // [module][lane][float4]: each module's output of a lane, which other lanes add to their
    // residuals.
    static constexpr uint32_t kResiduals = 0;
    static constexpr uint32_t kMessages =
        kResiduals + Shape<S>::kModules * S::kNumResiduals * kVector;
    // The next four are [layer][lane][float4]. kQkv: queries, keys and values. kPartials: partial
    // results of attention. kAttended: results of attention. kActs: the MLP's hidden vectors, with
    // experts [place][float4] of the chosen ones.
    static constexpr uint32_t kQkv = kMessages + Shape<S>::kModules * S::kNumLanes * kVector;
    static constexpr uint32_t kPartials = kQkv + S::kNumLayers * S::kNumLanes * kQkvFloat4s;
    static constexpr uint32_t kAttended =
        kPartials + S::kNumLayers * S::kNumLanes * kPartialsFloat4s;
    static constexpr uint32_t kActs = kAttended + S::kNumLayers * S::kNumLanes * kAttendedFloat4s;
    // [layer][float4]: the router's logits.
    static constexpr uint32_t kRouted = kActs + S::kNumLayers * S::kNumLanes * kFfnFloat4s;
    // [token step % 2][rank][block]: the control words at the end of a token step.
    static constexpr uint32_t kEnds = kRouted + S::kNumLayers * (kRouterRows<S> / 4);
    // [exchange % 2][kind][rank][block]: the control words of sampling.
    static constexpr uint32_t kControlWords = kEnds + 2 * S::kWorldSize * S::kBlocks;
    // [meeting % 2][rank][block]: the words of ConsumerWarp::meet_all().
    static constexpr uint32_t kMeetings =
        kControlWords + 2 * kNumControlWords * S::kWorldSize * S::kBlocks;
    // [block][warp], 16 bytes each: what a consumer warp or a collecting warp waits for; 0: nothing
    // (watch.cuh). Only this rank uses them.
    static constexpr uint32_t kWaiters = S::kWarps + 1;
    static constexpr uint32_t kWaits = kMeetings + 2 * S::kWorldSize * S::kBlocks;
    // A uint32: the number of the last request in which a key or value was NaN, or 0. Only this
    // rank uses it.
    static constexpr uint32_t kBad = kWaits + S::kBlocks * kWaiters;
    // The slots of column 1 and of those behind it, each like column 0's slots before
    // kControlWords. They are kept for the most columns of any kernel, because all kernels share
    // the buffer.
    static constexpr uint32_t kFurther = kBad + 1;
    // Where blocks share the mean of the residuals (head_mean.cuh): [column][float4], plain float4s
    // without tags, and behind them [block], that its share is stored.
    static constexpr uint32_t kMeans = kFurther + (S::kMostColumns - 1) * kControlWords;
    static constexpr uint32_t kHaveMeans =
        kMeans + (S::kMostColumns > 1 ? S::kMostColumns * kVector : 0);
    // With seats, each column has exchanges of sampling of its own (choosers.cuh):
    // [column][exchange % 2][kind][rank][block], and behind them [block], plain float4s: the
    // block's numbers of the columns' exchanges.
    static constexpr uint32_t kSeatWords = kHaveMeans + (S::kMostColumns > 1 ? S::kBlocks : 0);
    static constexpr uint32_t kSeatCounts =
        kSeatWords + (S::kMostSeats > 1 ? S::kMostSeats * (kMeetings - kControlWords) : 0);
    static constexpr uint32_t kFloat4s = kSeatCounts + (S::kMostSeats > 1 ? S::kBlocks : 0);

    // Returns which slot a column has in place of column 0's slot `slot`.
    KCCL_DECODE static uint32_t in_column(uint32_t slot, uint32_t column) {
        if constexpr (S::kColumns == 1) return slot;
        return column == 0 ? slot : kFurther + (column - 1) * kControlWords + slot;
    }

    // Tells whether a slot, of any column, has a part of a vector and no control word.
    KCCL_DECODE static bool is_vector(uint32_t slot) {
        if (S::kColumns > 1 && slot >= kMeans) return slot < kSeatWords;
        if (S::kColumns > 1 && slot >= kFurther) slot = (slot - kFurther) % kControlWords;
        return slot < kEnds;
    }

    KCCL_DECODE static uint32_t residual(uint32_t module, uint32_t residual) {
        return kResiduals + (module * S::kNumResiduals + residual) * kVector;
    }
    KCCL_DECODE static uint32_t message(uint32_t module, uint32_t lane) {
        return kMessages + (module * S::kNumLanes + lane) * kVector;
    }
    KCCL_DECODE static uint32_t qkv(uint32_t layer, uint32_t lane) {
        return kQkv + (layer * S::kNumLanes + lane) * kQkvFloat4s;
    }
    // Returns the slot of the partial result of KV split 0, for a query head of a lane. The partial
    // results of the head's other KV splits follow.
    KCCL_DECODE static uint32_t partial(uint32_t layer, uint32_t lane, uint32_t head) {
        return kPartials + (layer * S::kNumLanes + lane) * kPartialsFloat4s +
               head * S::kKvSplits * Shape<S>::kPartialFloat4s;
    }
    // Returns the slot of the result of attention over all positions.
    KCCL_DECODE static uint32_t attended(uint32_t layer, uint32_t lane) {
        return kAttended + (layer * S::kNumLanes + lane) * kAttendedFloat4s;
    }
    KCCL_DECODE static uint32_t act(uint32_t layer, uint32_t lane) {
        return kActs + (layer * S::kNumLanes + lane) * kFfnFloat4s;
    }
    KCCL_DECODE static uint32_t routed(uint32_t layer) {
        return kRouted + layer * (kRouterRows<S> / 4);
    }
    KCCL_DECODE static uint32_t end(uint32_t token_step, uint32_t rank, uint32_t block) {
        return kEnds + ((token_step & 1u) * S::kWorldSize + rank) * S::kBlocks + block;
    }
    // Returns the slot of the control word of block 0 of rank 0, for a kind and an exchange of
    // sampling. Those of the other blocks follow.
    KCCL_DECODE static uint32_t control_word(uint32_t exchange, uint32_t kind) {
        return kControlWords +
               ((exchange & 1u) * kNumControlWords + kind) * S::kWorldSize * S::kBlocks;
    }
    // Does the same for the exchanges of a column, with seats.
    KCCL_DECODE static uint32_t seat_word(uint32_t column, uint32_t exchange, uint32_t kind) {
        return kSeatWords + column * (kMeetings - kControlWords) +
               (control_word(exchange, kind) - kControlWords);
    }
    // Returns the slot of the word of block 0 of rank 0 in a meeting (ConsumerWarp::meet_all).
    // Those of the other blocks follow.
    KCCL_DECODE static uint32_t meeting(uint32_t number) {
        return kMeetings + (number & 1u) * S::kWorldSize * S::kBlocks;
    }
};

// Returns the address at which a rank keeps the number of the last request in which a key or value
// was NaN.
template <class S>
KCCL_DECODE uint32_t* bad_request_at(const Task& task, int rank) {
    return reinterpret_cast<uint32_t*>(task.exchange_buffers[rank] +
                                       Slots<S>::kBad * sizeof(Float4));
}

}  // namespace kccl::decode
