// How blocks give each other vectors: quads of FP32 words whose lowest bit is a flag.
//
// Each vector of a pass through the model has a place of its own on the board. A pass is a round. A
// word's lowest bit, its tag, says in which round it was written, modulo 2. A reader polls until
// all four words of a quad have the tag of its own round. So the data is its own signal, needs no
// order, and nothing is ever cleared. Values lose their lowest bit.
//
// Why a tag of one bit is enough: each word of a vector is written once a round. All blocks of all
// ranks wait for each other at the end of a round, and that alone has fences (finish.cuh). So what
// was written in round r - 1 comes before every load of round r, and the load finds a word of round
// r - 1 or r. Without the fences a relaxed load might return a word of round r - 2, which has the
// same tag.
//
// The words with which they wait for each other have two places, which take turns, and a tag that
// changes every other round: a block may write those of round r + 1 while another still reads those
// of round r. But it writes those of round r + 2 only when all have read those of round r.
//
// Where sampling needs more (sample.cuh), blocks tell each other notes after that, in exchanges
// that have numbers of their own, over all rounds and requests. They have two places as well, and
// need no fence: a place is read by the same thread each time, and a thread that has read the word
// of exchange e - 2 cannot find that of e - 4, which has the tag of e. So every exchange has all
// its notes. Vectors are ordered by the fences before.
//
// Where nothing overlaps, all blocks meet behind every op (Worker::meet_all), in the same way, and
// count the meetings of a round from 0.
//
// The board is zero before round 0. Its tag is 1.
#pragma once

#include "shape.cuh"
#include "task.cuh"

namespace kccl::decode {

// The tag of a round, and of the words at its end, or of an exchange.
KCCL_CONSTEXPR uint32_t tag_of(uint32_t round) { return (round & 1u) ^ 1u; }
KCCL_CONSTEXPR uint32_t tag_of_end(uint32_t round) { return (round >> 1 & 1u) ^ 1u; }

// A value as readers see it.
KCCL_DEVICE float untagged(float value) {
    return platform::bit_cast<float>(platform::bit_cast<uint32_t>(value) & ~1u);
}

KCCL_DEVICE Quad untagged(Quad quad) {
    KCCL_UNROLL
    for (float& value : quad.value) value = untagged(value);
    return quad;
}

KCCL_DEVICE mem::Packet tagged(const Quad& quad, uint32_t tag) {
    uint32_t words[4];
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        words[i] = (platform::bit_cast<uint32_t>(quad.value[i]) & ~1u) | tag;
    }
    return {{words[0] | uint64_t{words[1]} << 32, words[2] | uint64_t{words[3]} << 32}};
}

// Bit 0 of the result is 0 if all four words have the tag; its other bits mean nothing. Results of
// several packets may be ORed and tested once.
KCCL_DEVICE uint32_t without_tag(mem::Packet packet, uint32_t tag) {
    uint32_t wrong = 0;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i)
        wrong |= static_cast<uint32_t>(packet.half[i / 2] >> i % 2 * 32) ^ tag;
    return wrong;
}

KCCL_DEVICE Quad quad_of(mem::Packet packet) {
    Quad quad;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        const auto word = static_cast<uint32_t>(packet.half[i / 2] >> i % 2 * 32);
        quad.value[i] = platform::bit_cast<float>(word & ~1u);
    }
    return quad;
}

// What a block tells all blocks of all ranks: three words, and one of 28 bits.
struct alignas(16) Note {
    uint32_t word[3];
    uint32_t small;
};

// The tags take the words' lowest bits, which go with the small one.
KCCL_DEVICE Quad quad_of(const Note& note) {
    Quad quad;
    uint32_t last = note.small << 4;
    KCCL_UNROLL
    for (int i = 0; i < 3; ++i) {
        quad.value[i] = platform::bit_cast<float>(note.word[i]);
        last |= (note.word[i] & 1u) << (i + 1);
    }
    quad.value[3] = platform::bit_cast<float>(last);
    return quad;
}

KCCL_DEVICE Note note_of(const Quad& quad) {
    const auto last = platform::bit_cast<uint32_t>(quad.value[3]);
    Note note;
    KCCL_UNROLL
    for (int i = 0; i < 3; ++i) {
        const auto word = platform::bit_cast<uint32_t>(quad.value[i]);
        note.word[i] = (word & ~1u) | (last >> (i + 1) & 1u);
    }
    note.small = last >> 4;
    return note;
}

// The notes of an exchange: sample.cuh says what they mean.
enum NoteKind : uint32_t { kBest, kBelow, kReached, kBefore, kFromPivot, kAll, kNumNotes };

// Where vectors lie on a board, in quads. Lanes are counted over all ranks.
template <class S>
struct Places {
    static constexpr uint32_t kVector = S::kHidden / 4;
    static constexpr uint32_t kQkvQuads = Shape<S>::kQkvRows / 4;
    static constexpr uint32_t kFfnQuads = S::kFfn / 4;
    static constexpr uint32_t kPartsQuads =
        S::kHeads * S::kSplits * Shape<S>::kPartQuads;  // of a lane
    static constexpr uint32_t kAttendedQuads = Shape<S>::kAttendedRows / 4;

    // [module][residual or lane][...]: the residual after a module, and the messages of a module.
    static constexpr uint32_t kResiduals = 0;
    static constexpr uint32_t kMessages =
        kResiduals + Shape<S>::kModules * S::kNumResiduals * kVector;
    // [layer][lane][...]
    static constexpr uint32_t kQkv = kMessages + Shape<S>::kModules * S::kNumLanes * kVector;
    static constexpr uint32_t kParts = kQkv + S::kNumLayers * S::kNumLanes * kQkvQuads;
    static constexpr uint32_t kAttended = kParts + S::kNumLayers * S::kNumLanes * kPartsQuads;
    static constexpr uint32_t kActs = kAttended + S::kNumLayers * S::kNumLanes * kAttendedQuads;
    // [round % 2][rank][block]
    static constexpr uint32_t kEnds = kActs + S::kNumLayers * S::kNumLanes * kFfnQuads;
    // [exchange % 2][note][rank][block]
    static constexpr uint32_t kNotes = kEnds + 2 * S::kWorldSize * S::kBlocks;
    // [meeting % 2][rank][block]
    static constexpr uint32_t kMeetings = kNotes + 2 * kNumNotes * S::kWorldSize * S::kBlocks;
    // [block][warp], a packet each: what a warp that multiplies, or collects, waits for
    // (watch.cuh). Only this rank uses them.
    static constexpr uint32_t kWaiters = S::kWarps + 1;
    static constexpr uint32_t kWaits = kMeetings + 2 * S::kWorldSize * S::kBlocks;
    // A uint32: the number of the last request that cached what is not a number. Only this rank
    // uses it.
    static constexpr uint32_t kBad = kWaits + S::kBlocks * kWaiters;
    static constexpr uint32_t kQuads = kBad + 1;

    KCCL_DEVICE static uint32_t residual(uint32_t module, uint32_t residual) {
        return kResiduals + (module * S::kNumResiduals + residual) * kVector;
    }
    KCCL_DEVICE static uint32_t message(uint32_t module, uint32_t lane) {
        return kMessages + (module * S::kNumLanes + lane) * kVector;
    }
    KCCL_DEVICE static uint32_t qkv(uint32_t layer, uint32_t lane) {
        return kQkv + (layer * S::kNumLanes + lane) * kQkvQuads;
    }
    // Attention over a split, for a query head of a lane: that of split 0; the others follow.
    KCCL_DEVICE static uint32_t part(uint32_t layer, uint32_t lane, uint32_t head) {
        return kParts + (layer * S::kNumLanes + lane) * kPartsQuads +
               head * S::kSplits * Shape<S>::kPartQuads;
    }
    // Attention over all positions.
    KCCL_DEVICE static uint32_t attended(uint32_t layer, uint32_t lane) {
        return kAttended + (layer * S::kNumLanes + lane) * kAttendedQuads;
    }
    KCCL_DEVICE static uint32_t act(uint32_t layer, uint32_t lane) {
        return kActs + (layer * S::kNumLanes + lane) * kFfnQuads;
    }
    KCCL_DEVICE static uint32_t end(uint32_t round, uint32_t rank, uint32_t block) {
        return kEnds + ((round & 1u) * S::kWorldSize + rank) * S::kBlocks + block;
    }
    // The place of the note of block 0 of rank 0; the others' follow.
    KCCL_DEVICE static uint32_t note(uint32_t exchange, uint32_t kind) {
        return kNotes + ((exchange & 1u) * kNumNotes + kind) * S::kWorldSize * S::kBlocks;
    }
    // The place of the meeting word of block 0 of rank 0; the others' follow.
    KCCL_DEVICE static uint32_t meeting(uint32_t number) {
        return kMeetings + (number & 1u) * S::kWorldSize * S::kBlocks;
    }
};

// Where a rank keeps the number of the last request that cached what is not a number.
template <class S>
KCCL_DEVICE uint32_t* bad_request_at(const Task& task, int rank) {
    return reinterpret_cast<uint32_t*>(task.boards[rank] + Places<S>::kBad * sizeof(Quad));
}

}  // namespace kccl::decode
