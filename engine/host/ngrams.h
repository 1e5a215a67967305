// A table of n-grams: the id that most often followed on the last few ids in some texts
// (model/ngrams.py builds it). It proposes drafts where a text has not had its last ids before.
//
// The table is an array of words of 32 bits, a power of 2 of them. A hash of the last ids, from the
// last one backwards, says which word is theirs: its highest bits. The word's lower bits are the id
// that follows, plus 1; 0 means that the word is empty. Its upper bits equal those of the hash's
// lower word. So a table may propose an id for ids that it does not have, though seldom.
#pragma once

#include "api.h"

namespace kccl::engine {

class Ngrams {
  public:
    Ngrams() = default;
    explicit Ngrams(const KcclEngineNgrams& table) : table_(table) {}

    // Writes guesses of the ids that follow on a text to `drafts`, at most `most`. Each follows on
    // those before it. Returns their number: there may be no table, or it knows none.
    uint32_t propose(const int32_t* ids, uint32_t num_ids, uint32_t most, int32_t* drafts) const;

  private:
    // Returns the id that follows on the longest run that the table has, which is of at most
    // kKcclEngineNgramIds ids; -1 if it has none. last(i): the last id but i.
    template <class Last>
    int32_t follow(uint32_t num_ids, Last last) const {
        const auto* words = reinterpret_cast<const uint32_t*>(table_.words);
        const uint32_t mask = (1u << table_.id_bits) - 1;
        uint64_t hashed = 0;
        int32_t found = -1;
        for (uint32_t i = 0; i < kKcclEngineNgramIds && i < num_ids; ++i) {
            hashed = (hashed ^ (uint64_t{static_cast<uint32_t>(last(i))} + 1)) * kFactor;
            hashed ^= hashed >> 32;
            const uint32_t word = words[hashed >> (64 - table_.slot_bits)];
            const uint32_t id = word & mask;
            if (((word ^ static_cast<uint32_t>(hashed)) & ~mask) == 0 && id != 0) found = id - 1;
        }
        return found;
    }

    static constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
    KcclEngineNgrams table_ = {};
};

}  // namespace kccl::engine
