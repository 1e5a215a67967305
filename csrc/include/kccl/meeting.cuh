// Makes the first warps of a block wait for each other, while the block's other warps do something
// else.
#pragma once

#include "coop.cuh"

namespace kccl {

// The state of meetings, in block-shared memory. There may be at most 16 warps.
struct MeetingPlace {
    mem::CopyBarrier met;  // its phase ends when all warps have arrived
    // Whether any thread of each warp has passed true. Meetings use the two rows in turn, because a
    // warp may already store its value for the next meeting while others still read this one's.
    struct alignas(16) Said {
        uint8_t of_warp[16];
    } said[2];
};

// Initialises `place` for num_warps warps. Called once, by one thread. The block must synchronise
// before the first meeting.
KCCL_DEVICE void init_meeting(MeetingPlace& place, uint32_t num_warps) {
    mem::init_copies(&place.met, num_warps);
}

// One thread's part of the meetings. Each thread of the first WARPS warps of a block makes an
// object. All of them call meet() equally often.
template <uint32_t WARPS>
class Meeting {
  public:
    KCCL_DEVICE explicit Meeting(MeetingPlace& place) : place_(place) {}

    // Waits until all WARPS warps have called it. After it, each sees what any of them did to
    // block-shared memory before. Returns whether any thread passed true.
    KCCL_DEVICE bool meet(bool mine) {
        if constexpr (mem::kMeetsInHardware) {
            return mem::meet_any(WARPS * platform::kWarpSize, mine);
        }
        static_assert(WARPS <= sizeof(place_.said[0].of_warp), "a byte for each warp");
        const Warp coop = warp();
        const bool any = platform::warp_any(mine);
        coop.sync();
        if (leads(coop)) {
            const uint32_t index = platform::thread_in_block() / platform::kWarpSize;
            mem::store_plain(&place_.said[parity_].of_warp[index], uint8_t{any});
            mem::arrive(&place_.met);
        }
        while (platform::warp_any(!mem::has_completed(&place_.met, parity_))) mem::poll_pause();
        bool all = false;
        for (uint32_t i = 0; i < WARPS; ++i) {
            all |= mem::load_plain(&place_.said[parity_].of_warp[i]) != 0;
        }
        parity_ ^= 1u;
        return all;
    }

  private:
    MeetingPlace& place_;
    uint32_t parity_ = 0;
};

}  // namespace kccl
