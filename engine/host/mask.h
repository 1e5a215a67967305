// The mask of the ids that may be chosen for a position. If a request has a grammar, Python posts a
// mask for each position.
//
// One array suffices. Python posts a mask only when it has taken the last token, and by then the
// leading block (block 0 of rank 0), which alone reads masks, has read the last one.
#pragma once

#include "memory.h"
#include "team.h"

namespace kccl::engine {

class Mask {
  public:
    explicit Mask(uint32_t vocab_size)
        : num_words_((vocab_size + 31) / 32), words_(zeros<uint32_t>(num_words_)) {}

    bool is_complete() const { return words_ != nullptr; }

    // Forgets the masks of the last request. No block may work meanwhile. Position 0 stands for no
    // mask, because no token is chosen for position 0.
    void reset() { position_ = 0; }

    void post(uint32_t position, const uint32_t* words) {
        std::copy_n(words, num_words_, words_.get());
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(&position_, position);
    }

    // Waits until the mask of a position is posted, or is_cancelled() is true. Returns false if the
    // wait failed. Only the leading block waits.
    template <class IsCancelled>
    bool await(const DeviceComm& comm, uint32_t position, IsCancelled is_cancelled) const {
        uint32_t seen = 0;
        const auto is_there = [&] {
            seen = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&position_);
            return seen == position || is_cancelled();
        };
        // If the wait fails, it reports this rank as missing, because Python posts masks in this
        // rank's process.
        const auto missing = [&] { return Missing{1u << comm.rank, seen}; };
        return wait_until(comm, Awaited{kKcclEngineStep, kKcclEngineMask, position}, is_there,
                          missing);
    }

    // Tells whether the mask of a position is posted.
    bool is_posted(uint32_t position) const {
        return mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&position_) == position;
    }

    // Returns the mask. Bit i % 32 of word i / 32 is set if id i may be chosen.
    const uint32_t* words() const { return words_.get(); }

  private:
    const uint32_t num_words_;
    const Array<uint32_t> words_;
    uint32_t position_ = 0;  // the position whose mask was posted last, or 0
};

}  // namespace kccl::engine
