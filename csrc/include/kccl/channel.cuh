// One stream of calls: epochs, the two slots, and why the next call cannot corrupt this one.
//
// Call e uses the slots of its parity. They were last used by call e-2, so before a rank pushes
// anything in call e it must know that every peer has left e-2, that is, has entered e-1:
//   - a pairwise call (all_reduce, barrier) ends only when every peer's words of that call are in,
//     so after a pairwise call e-1 the rank knows;
//   - any other call (broadcast) sends a credit "I have entered e-1" to every peer at its start and
//     does not wait for it; the call after it waits for these credits, which have long arrived.
// The sync in next() separates this coop's reads in call e-1 from its writes in call e, so that the
// argument holds for all its threads, whatever the length and the kind of the two calls.
//
// Epochs wrap. A packet's flag must equal the epoch, a flag word must not be behind it, so a word
// that nobody writes for a whole period would look valid again. Twice a period the channel is
// scrubbed: every rank resets its own words to the epoch just past, and a barrier keeps the peers
// from pushing before that. The barrier's words are not reset: the scrub itself writes them twice a
// period.
//
// packets.pml models all this, and tests/test_model.py tries all its runs.
#pragma once

#include "barrier.cuh"

namespace kccl {

enum class Exchange {
    kPairwise,  // the call ends only when this rank has seen a word of every peer
    kCredited   // it may end earlier
};

template <class Coop>
KCCL_DEVICE_SHARED Status scrub(Coop coop, const Call& call, uint32_t epoch) {
    const DeviceComm& comm = call.comm;
    const uint32_t past = epoch - comm.epoch_step;
    const uint64_t stale = static_cast<uint64_t>(past) << 32;
    for (int source = 0; source < comm.world_size; ++source) {
        for (uint32_t parity = 0; parity < 2; ++parity) {
            mem::Packet* slot = packet_slot(comm, comm.rank, call.channel, parity, source);
            for (uint64_t i = coop.index(); i < comm.layout.packet_bytes / 8; i += coop.size()) {
                mem::store_packet(slot + i, mem::Packet{{stale, stale}});
            }
        }
        if (!leads(coop)) continue;
        for (int flag = kKcclFlagBarrier + 1; flag < kKcclNumFlags; ++flag) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                flag_word(comm, comm.rank, call.channel, static_cast<KcclFlag>(flag), source),
                past);
        }
    }
    arrive<mem::Order::kRelease>(coop, call, kKcclFlagBarrier, epoch);
    return await<mem::Order::kAcquire>(coop, call, kKcclFlagBarrier, epoch);
}

// Why on a CPU: peers pull from the slots, and their reads must come before their credit (mem.cuh).
constexpr mem::Order kCreditArrive = platform::kCpu ? mem::Order::kRelease : mem::Order::kRelaxed;
constexpr mem::Order kCreditAwait = platform::kCpu ? mem::Order::kAcquire : mem::Order::kRelaxed;

class Channel {
  public:
    KCCL_DEVICE explicit Channel(const Call& call) : call_(call) {}

    // Enters the next call of the channel. Called by all threads of the coop, on every rank in the
    // same order. On failure nothing may be sent.
    template <class Coop>
    KCCL_DEVICE Status next(Coop coop, Exchange exchange) {
        const DeviceComm& comm = call_.comm;
        ChannelState* channel = channel_state(comm, call_.channel);
        const Status status = status_of(comm);
        // The channel's state is plain memory: any() separates the reads here from the writes of the
        // call before, sync() from this one's.
        if (coop.any(status != kKcclOk)) return status_of(comm);
        const uint32_t last_epoch = channel->epoch;
        const bool credit_due = channel->credit_due != 0;
        epoch_ = last_epoch + comm.epoch_step;
        platform::enter_call(comm.state, call_.kernel, call_.channel, epoch_);
        coop.sync();
        if (leads(coop)) {
            channel->epoch = epoch_;
            channel->credit_due = exchange == Exchange::kCredited;
            // Once a channel, so that no other call pays for the store.
            if (last_epoch == comm.epoch_step) {
                mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(&state_of(comm)->contacted,
                                                                      1u);
            }
        }
        Status entered = kKcclOk;
        if ((epoch_ << 1) == 0) {
            entered = scrub(coop, call_, epoch_);
        } else if (credit_due) {
            entered = await<kCreditAwait>(coop, call_, kKcclFlagCredit, last_epoch);
        }
        if (entered != kKcclOk) return entered;
        if (exchange == Exchange::kCredited) {
            arrive<kCreditArrive>(coop, call_, kKcclFlagCredit, epoch_);
        }
        return kKcclOk;
    }

    KCCL_DEVICE uint32_t epoch() const { return epoch_; }
    KCCL_DEVICE uint32_t parity() const { return (epoch_ & call_.comm.epoch_step) != 0 ? 1 : 0; }

  private:
    const Call& call_;
    uint32_t epoch_ = 0;
};

}  // namespace kccl
