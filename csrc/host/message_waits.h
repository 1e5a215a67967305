// How a rank on a CPU waits until one of its messages is done, or checks whether the message can
// still be done: see messages.h.
#pragma once

#include <optional>

#include "../include/kccl/messages.cuh"
#include "routes.h"
#include "tags.h"

namespace kccl::host {
namespace {

// Returns the kernel that stands in a record about a part of a call: kKcclAllToAllParts if the call
// has no other steps than its messages (parts.inc), otherwise that of a kKcclMessageStep.
inline uint32_t kernel_in_record(int32_t tag) {
    const auto kernel = static_cast<uint32_t>(kernel_of_parts(tag));
    return kernel == kKcclAllToAllParts ? kernel : kernel | kKcclPosted;
}

// Returns the record of the failure that a message and its receive have different lengths.
// source, head: of the message.
inline Record lengths_differ(const KcclDeviceComm& comm, const KcclMessage& receive, int source,
                             const RecordHead& head) {
    constexpr uint64_t kLargest = 0xffffffff;
    const auto most = [](uint64_t bytes) {
        return static_cast<uint32_t>(bytes < kLargest ? bytes : kLargest);
    };
    const bool is_part = is_of_parts(head.tag);
    uint32_t received = kKcclRecv;
    uint64_t sent = kKcclSend;
    if (is_part) sent = received = kernel_in_record(head.tag);
    return Record{kKcclCallsDiffer,
                  comm.rank,
                  source,
                  received,
                  is_part ? channel_of_parts(head.tag) : head.tag,
                  most(receive.num_bytes),
                  most(head.num_bytes),
                  received << 24,
                  sent << 24};
}

// Waits for one rank's messages. One object does so for all messages of a communicator.
class MessageWaits {
  public:
    // routes: for a communicator of several teams (groups of at most 8 ranks), how messages reach
    // all ranks (routes.inc); null if `comm` has all ranks.
    MessageWaits(const KcclDeviceComm& comm, KcclRoutes* routes) : comm_(comm), routes_(routes) {}

    // Returns when the message is done, or when the communicator has failed. poll() sends and
    // receives what it can of all messages, and returns true when this one is done or after a
    // failure. num_early(ranks) returns the number of early messages (early.h) that came from these
    // ranks, a bit each; it goes into the record of a failure.
    template <class Poll, class NumEarly>
    void wait(const KcclMessage& message, Poll poll, NumEarly num_early) {
        const uint64_t hopes = hopes_of(message);
        if (routes_ == nullptr) {
            const auto missing = [&] { return missing_of(message, hopes, num_early(hopes)); };
            wait_until(comm_, awaited(message), poll, missing);
        } else {
            const TeamsInUse here(reinterpret_cast<const KcclHostTeams*>(routes_->teams));
            MessagePatience patience(*routes_, awaited(message), hopes, message.peer >= 0, true);
            const auto polls = [&] {
                for (uint32_t i = 0; i < comm_.polls_per_check; ++i) {
                    if (poll()) return true;
                    mem::poll_pause();
                }
                return false;
            };
            while (!polls() && patience.may_go_on(comm_, num_early(hopes))) {
            }
        }
        // This rank has heard from a peer. So from now on its waits have the timeout limit_ns of
        // KcclState instead of first_limit_ns, as after a first collective.
        if (message.is_done != 0 && message.peer != comm_.rank) state_of(comm_)->contacted = 1;
    }

    // Checks, at most every 2 ms, whether a message that is not done can still complete, and fails
    // the communicator if it cannot. There is no timeout, because the caller only tests the message
    // and does not wait. After this the caller must call Messages::move() once more, because a peer
    // that has ended may have sent the message before its end.
    template <class NumEarly>
    void look(const KcclMessage& message, NumEarly num_early) {
        const uint64_t now = kccl_host_clock_ns();
        if (now - looked_ns_ < kLookEveryNs) return;
        looked_ns_ = now;
        const uint64_t hopes = hopes_of(message);
        const bool is_another = looked_for_ != &message;
        looked_for_ = &message;
        if (routes_ == nullptr) {
            if (is_another) patience_ = {};
            patience_.clock.started_ns = 0;
            may_go_on(comm_, awaited(message), patience_,
                      missing_of(message, hopes, num_early(hopes)));
        } else {
            const TeamsInUse here(reinterpret_cast<const KcclHostTeams*>(routes_->teams));
            if (is_another) {
                far_patience_.emplace(*routes_, awaited(message), hopes, message.peer >= 0, false);
            }
            far_patience_->may_go_on(comm_, num_early(hopes));
        }
    }

  private:
    // Returns the ranks from which the message may come or to which it goes, a bit each: its peer,
    // or all ranks but this one for a receive from any rank.
    uint64_t hopes_of(const KcclMessage& message) const {
        if (message.peer >= 0) return uint64_t{1} << message.peer;
        const uint64_t all = ~uint64_t{0} >> (64 - comm_.world_size);
        const uint64_t others = all & ~(uint64_t{1} << comm_.rank);
        return others != 0 ? others : all;
    }
    Awaited awaited(const KcclMessage& message) const {
        if (is_of_parts(message.tag)) {
            const int32_t channel = channel_of_parts(message.tag);
            const uint32_t kernel = kernel_in_record(message.tag);
            return {kernel, channel, number_of_call(kernel, channel), Need::kEach};
        }
        const KcclKernel kernel = message.receives != 0 ? kKcclRecv : kKcclSend;
        return {static_cast<uint32_t>(kernel), message.tag, 1,
                message.peer < 0 ? Need::kAny : Need::kEach};
    }
    // Returns the number that a record about a part has: of a kKcclMessageStep that of its call,
    // which the call has posted before (postings.cpp).
    uint32_t number_of_call(uint32_t kernel, int32_t channel) const {
        if (kernel == kKcclAllToAllParts) return 1;
        const auto& teams = *reinterpret_cast<const KcclHostTeams*>(routes_->teams);
        const auto& postings = *reinterpret_cast<const KcclPostings*>(teams.postings);
        return static_cast<uint32_t>(reinterpret_cast<const uint64_t*>(postings.numbers)[channel]);
    }
    static Missing missing_of(const KcclMessage& message, uint64_t hopes, uint32_t num_early) {
        return {message.is_done != 0 ? 0 : static_cast<uint32_t>(hopes), num_early};
    }

    const KcclDeviceComm& comm_;
    KcclRoutes* const routes_;
    // The message of the last look(), the time of that look(), and what repeated calls of look()
    // for this message have found out about its peers.
    const KcclMessage* looked_for_ = nullptr;
    uint64_t looked_ns_ = 0;
    Patience patience_;
    std::optional<MessagePatience> far_patience_;
};

}  // namespace
}  // namespace kccl::host
