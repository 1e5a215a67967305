// Random waits, by which tests let warps, blocks and ranks run at different speeds. S::kDelayNs is
// the longest wait; if it is 0, nothing waits.
#pragma once

#include "device.cuh"

namespace kccl::decode {

// Makes one warp's random waits. All threads of the warp make an object and call wait().
template <class S>
class Delays {
  public:
    KCCL_DECODE explicit Delays(int rank) : is_slow_(rank == S::kSlowRank) {
        if constexpr (S::kDelayNs != 0) {
            const uint32_t warp_index = platform::thread_in_block() / platform::kWarpSize;
            const uint32_t block = rank * S::kBlocks + platform::block_in_grid();
            state_ = (block * 64 + warp_index + 1) * 2654435761u;
        }
    }

    // Waits a random time of at most kDelayNs. The slow rank always waits kDelayNs.
    KCCL_DECODE void wait() {
        if constexpr (S::kDelayNs != 0) {
            // This is a step of Marsaglia's xorshift generator.
            state_ ^= state_ << 13;
            state_ ^= state_ >> 17;
            state_ ^= state_ << 5;
            const uint64_t wait_ns = is_slow_ ? S::kDelayNs : state_ % S::kDelayNs;
            const uint64_t begin = mem::clock_ns();
            while (mem::clock_ns() - begin < wait_ns) mem::poll_pause();
            warp().sync();
        }
    }

  private:
    const bool is_slow_;
    uint32_t state_ = 0;  // the generator's state; never 0 if there are waits
};

}  // namespace kccl::decode
