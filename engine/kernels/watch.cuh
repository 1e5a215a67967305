// How waits end although the warps that multiply have no clock. Around the slow path of a wait,
// which is long, they would keep their registers in memory (bench/LOG.md). So a warp that has
// polled often in vain writes down what it waits for, and looks whether it is to give up. The warp
// that copies the weights watches: it has time when the ring is full, as it is when the block
// waits.
#pragma once

#include "board.cuh"

namespace kccl::decode {

// What a warp waits for, as a word: which ranks, and the round. 0: it does not wait.
KCCL_DEVICE uint64_t wait_word(uint32_t ranks, uint32_t round) {
    return uint64_t{round} << 32 | ranks;
}

template <class S>
KCCL_DEVICE uint64_t* wait_at(const DeviceComm& comm, const Task& task, uint32_t warp_index) {
    const uint64_t place = Places<S>::kWaits + platform::block_in_grid() * S::kWarps + warp_index;
    return reinterpret_cast<uint64_t*>(task.boards[comm.rank] + place * sizeof(Quad));
}

// All threads of the warp that watches make one and call look() again and again.
template <class S>
class Watch {
  public:
    KCCL_DEVICE Watch(const DeviceComm& comm, const Task& task, mem::CopyBarrier* gave_up)
        : comm_(comm), task_(task), gave_up_(gave_up) {}

    // Now and then checks on the block's waits. When one has failed, all of them are to give up.
    KCCL_DEVICE void look() {
        if (has_given_up_ || ++looks_ < comm_.polls_per_check) return;
        looks_ = 0;
        const uint32_t thread = warp().index();
        static_assert(S::kWarps <= platform::kWarpSize, "a thread for each warp");
        const uint64_t word = thread < S::kWarps
                                  ? mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
                                        wait_at<S>(comm_, task_, thread))
                                  : 0;
        if (word != last_) patience_.started_ns = 0;
        last_ = word;
        const auto ranks = static_cast<uint32_t>(word), round = static_cast<uint32_t>(word >> 32);
        const Awaited awaited = {kKcclEngineStep, static_cast<int32_t>(platform::block_in_grid()),
                                 round + 1};
        if (warp_may_go_on(comm_, awaited, patience_, Missing{ranks, round})) return;
        has_given_up_ = true;
        if (leads(warp())) mem::arrive(gave_up_);
    }

  private:
    const DeviceComm& comm_;
    const Task& task_;
    mem::CopyBarrier* const gave_up_;
    Patience patience_;
    uint64_t last_ = 0;
    uint32_t looks_ = 0;
    bool has_given_up_ = false;
};

}  // namespace kccl::decode
