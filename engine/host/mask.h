// The mask of the ids that may be chosen for a position. Python posts it for a request with a
// grammar.
//
// One array suffices. Python posts a mask only when it has taken the last token, and by then the
// leading block has read the last mask.
#pragma once

#include "memory.h"
#include "team.h"

namespace kccl::engine {

class Mask {
  public:
    explicit Mask(uint32_t vocab_size)
        : num_words_((vocab_size + 31) / 32), words_(zeros<uint32_t>(num_words_)) {}

    bool is_complete() const { return words_ != nullptr; }

    // Forgets the masks of the last request. No block may work meanwhile. 0 means that there is no
    // mask, because no token is chosen for position 0.
    void reset() { position_ = 0; }

    void post(uint32_t position, const uint32_t* words) {
        std::copy_n(words, num_words_, words_.get());
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(&position_, position);
    }

    // Waits for the mask of a position, or until is_cancelled(). Returns false if the wait failed.
    // Only the leading block waits.
    template <class IsCancelled>
    bool await(const DeviceComm& comm, uint32_t position, IsCancelled is_cancelled) const {
        uint32_t seen = 0;
        const auto is_there = [&] {
            seen = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&position_);
            return seen == position || is_cancelled();
        };
        // A missing mask is reported as this rank's fault, because Python runs in this rank's
        // process.
        const auto missing = [&] { return Missing{1u << comm.rank, seen}; };
        return wait_until(comm, Awaited{kKcclEngineStep, kKcclEngineMask, position}, is_there,
                          missing);
    }

    // Bit i % 32 of word i / 32 is set if id i may be chosen.
    const uint32_t* words() const { return words_.get(); }

  private:
    const uint32_t num_words_;
    const Array<uint32_t> words_;
    uint32_t position_ = 0;  // the position whose mask is there
};

}  // namespace kccl::engine
