#include "types.h"

#include <algorithm>

namespace kccl::sim {

uint32_t Slots::of(int32_t rank, int32_t block, uint32_t lane) {
    const size_t column = static_cast<size_t>(block + 1);
    std::vector<uint32_t>& slots = by_lane_[{rank, lane}];
    while (column >= slots.size()) {
        const auto next_block = static_cast<int32_t>(slots.size()) - 1;
        slots.push_back(static_cast<uint32_t>(owners_.size()));
        owners_.push_back({rank, next_block});
        owners_.push_back({rank, next_block});
    }
    return slots[column];
}

uint32_t Calls::enter(uint64_t state, uint32_t kernel, int32_t channel, uint32_t epoch,
                      uint64_t site) {
    // Calls between the blocks of a grid count as streams of their own, not as calls of a channel:
    // ranks may make different numbers of them, and the channel's calls would get different
    // numbers.
    const int32_t stream = kernel == kKcclGridSync       ? -1
                           : kernel == kKcclGridExchange ? -2 - channel
                                                         : channel;
    Last& last = last_[{state, stream}];
    for (const Last::Entered& each : last.entered) {
        // Two calls may have the same epoch, because a user's kernel and the rank's program
        // each count their own epochs. So the kernel is compared too.
        if (each.index == 0 || each.epoch != epoch || (*this)[each.index].kernel != kernel)
            continue;
        return each.index;
    }
    std::copy_backward(last.entered.begin(), last.entered.end() - 1, last.entered.end());
    last.entered[0] = {next_++, epoch};
    const uint32_t index = last.entered[0].index;
    const CallInfo info = {state, kernel, channel, epoch, ++last.number, site};
    if (known_.size() < kKept) {
        known_.push_back(info);
    } else {
        known_[index % kKept] = info;
    }
    return index;
}

void Calls::forget(uint64_t state) {
    const auto first = last_.lower_bound({state, INT32_MIN});
    auto end = first;
    while (end != last_.end() && end->first.first == state) ++end;
    last_.erase(first, end);
}

}  // namespace kccl::sim
