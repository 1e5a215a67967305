// One stream of calls: epochs, the two slots, and why the next call cannot corrupt this one.
//
// Call e uses the slots of its parity. They were last used by call e-2, so before a rank pushes
// anything in call e it must know that every peer has left e-2, that is, has entered e-1:
//   - a pairwise call (all but broadcast) ends only when every peer's words of that call are in,
//     so after a pairwise call e-1 the rank knows;
//   - any other call (broadcast) sends a credit "I have entered e-1" to every peer at its start and
//     does not wait for it; the call after it waits for these credits, which have long arrived.
// Every call ends with a sync of the coop, in leave() or in await(), or with its kernel. That
// separates the coop's reads in call e-1 from its writes in call e, so that the argument holds for
// all its threads, whatever the length and the kind of the two calls.
//
// Epochs wrap. A packet's flag must equal the epoch, a flag word must not be behind it, so a word
// that nobody writes for a whole period would look valid again. Twice a period the channel is
// scrubbed: every rank resets its own words to the epoch just past, and a barrier keeps the peers
// from pushing before that. The barrier's words are not reset: the scrub itself writes them twice a
// period.
//
// Between calls the channel lives in registers: opening it is what costs, so a kernel of many calls
// opens it once.
//
// csrc/models/packets.pml models all this, and tests/csrc/test_model.py tries all its runs.
#pragma once

#include "barrier.cuh"
#include "payload.cuh"

namespace kccl {

enum class Exchange {
    kPairwise,  // the call ends only when this rank has seen a word of every peer
    kCredited   // it may end earlier
};

// Why on a CPU: peers pull from the slots, and their reads must come before their credit (mem.cuh).
constexpr mem::Order kCreditArrive = platform::kCpu ? mem::Order::kRelease : mem::Order::kRelaxed;
constexpr mem::Order kCreditAwait = platform::kCpu ? mem::Order::kAcquire : mem::Order::kRelaxed;

// Called by all threads of the coop when they enter the call that is `awaited`.
template <class Coop>
KCCL_DEVICE_COLD Status scrub(Coop coop, const DeviceComm& comm, int index, Awaited awaited) {
    const uint32_t epoch = awaited.wanted;
    const uint32_t past = epoch - comm.epoch_step;
    const uint64_t stale = static_cast<uint64_t>(past) << 32;
    for (int source = 0; source < comm.world_size; ++source) {
        for (uint32_t parity = 0; parity < 2; ++parity) {
            mem::Packet* slot = packet_slot(comm, comm.rank, index, parity, source);
            for (uint64_t i = coop.index(); i < comm.layout.packet_bytes / kPayloadBytes;
                 i += coop.size()) {
                mem::store_packet(slot + i, mem::Packet{{stale, stale}});
            }
        }
        if (!leads(coop)) continue;
        for (int flag = kKcclFlagCredit; flag < kKcclNumFlags; ++flag) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                flag_word(comm, comm.rank, index, static_cast<KcclFlag>(flag), source), past);
        }
    }
    arrive<mem::Order::kRelease>(coop, comm, index, kKcclFlagBarrier, epoch);
    return await<mem::Order::kAcquire>(coop, comm, index, kKcclFlagBarrier, awaited, 0,
                                       comm.world_size);
}

// The channel that a coop uses when it is given none.
KCCL_DEVICE int default_channel(Block) { return platform::block_in_grid(); }
KCCL_DEVICE int default_channel(Warp) {
    const uint32_t warps = platform::threads_per_block() / platform::kWarpSize;
    return platform::block_in_grid() * warps + platform::thread_in_block() / platform::kWarpSize;
}
KCCL_DEVICE int default_channel(Thread) {
    return platform::block_in_grid() * platform::threads_per_block() + platform::thread_in_block();
}

// What a channel is opened for. kLaunch counts on this: when a kernel begins, the stores of the one
// before it on its stream, or in its graph, into this rank's own window have been performed. So a
// programmatic dependent waits for that before it reads anything.
enum class Opening {
    kManyCalls,  // opening may take longer so that calls are shorter
    kOneCall,    // what opening reads is on its way while the caller goes on: see check()
    kLaunch      // the same, of a kernel's only opening of this channel
};

// A coop's stream of calls on one channel. All threads of the coop open it, make the same calls and
// let it end together. One coop at a time has a channel open, on every rank; the same channel sees
// the same sequence of calls on every rank.
//
// WORLD_SIZE: the communicator's, so that loops over ranks unroll; 0: whatever it is.
template <class Coop, int WORLD_SIZE = 0>
class Channel {
  public:
    // `channel`: below comm.num_channels; `block`: of a call of several blocks, each of which has
    // its own part of the channel. `comm` outlives this.
    KCCL_DEVICE Channel(Coop coop, const DeviceComm& comm, int channel, int block = 0,
                        Opening opening = Opening::kManyCalls)
        : coop_(coop),
          comm_(comm),
          channel_(channel),
          opening_(opening),
          is_ordered_(!platform::kCpu && opening == Opening::kLaunch) {
        if (opening == Opening::kLaunch) mem::await_kernels_before();
        index_ = channel * comm.blocks_per_channel + block;
        found_ = status_of(comm);
        state_ = load_state(channel_state(comm, index_));
        for (int k = 0; k < kMaxRanks<WORLD_SIZE> && k < world_size(); ++k) {
            outbox_[k] = packet_slot(comm, receiver(k), index_, 0, comm.rank);
        }
        inbox_ = packet_slot(comm, comm.rank, index_, 0, 0);
        thread_ = coop.index();
        num_threads_ = coop.size();
        step_ = comm.epoch_step;
        slot_packets_ = static_cast<uint32_t>(comm.layout.packet_bytes / kPayloadBytes);
        const bool many_calls = opening == Opening::kManyCalls;
        if (many_calls) keep_at_hand();
        half_packets_ = world_size() * slot_packets_;
        if (many_calls) check();
    }

    KCCL_DEVICE explicit Channel(Coop coop, const DeviceComm& comm)
        : Channel(coop, comm, default_channel(coop)) {}

    // Of a kernel that makes one call of the host's.
    KCCL_DEVICE explicit Channel(const Call& call)
        : Channel(Coop(), call.comm, call.channel, platform::block_in_grid(), Opening::kLaunch) {
        has_dependent_ = call.dependent == kKcclEarlyDependent;
    }

    // Keeps what the next to open the channel must know.
    KCCL_DEVICE ~Channel() {
        // What failed has not happened: only a reset, which forgets all, may follow.
        if (is_kept_ || status_ != kKcclOk || kernel_ == kKcclNumKernels) return;
        if (leads(coop_)) store_state(channel_state(comm_, index_), state_);
        // The end of the kernel is as good.
        if (opening_ != Opening::kLaunch) coop_.sync();
    }

    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    KCCL_DEVICE Coop coop() const { return coop_; }
    // The coop's index() and size(), at hand.
    KCCL_DEVICE uint32_t thread() const { return thread_; }
    KCCL_DEVICE uint32_t num_threads() const { return num_threads_; }
    KCCL_DEVICE const DeviceComm& comm() const { return comm_; }
    KCCL_DEVICE int world_size() const { return WORLD_SIZE > 0 ? WORLD_SIZE : comm_.world_size; }
    KCCL_DEVICE int index() const { return index_; }
    // Of a call's message, in one round.
    KCCL_DEVICE uint64_t max_bytes() const { return uint64_t{slot_packets_} * kPayloadBytes; }
    KCCL_DEVICE uint32_t epoch() const { return state_.epoch; }
    KCCL_DEVICE uint32_t parity() const { return (state_.epoch & comm_.epoch_step) != 0 ? 1 : 0; }
    KCCL_DEVICE Status status() const { return status_; }

    // The k-th rank that this one sends to: its peers, from the rank after it, then itself.
    KCCL_DEVICE int receiver(int k) const {
        const int rank = comm_.rank + 1 + k;
        return rank < world_size() ? rank : rank - world_size();
    }
    // Where packet i of this call goes, in the window of receiver(k).
    KCCL_DEVICE mem::Packet* outbox(int k, uint32_t i) const { return outbox_[k] + (offset_ + i); }
    // Where packet i of `source` arrives, `source` itself included.
    KCCL_DEVICE const mem::Packet* inbox(int source, uint32_t i) const {
        return inbox_ + (offset_ + source * slot_packets_ + i);
    }

    // Whether all that earlier calls did comes before all that this one does, as if by a fence.
    KCCL_DEVICE bool is_ordered() const { return is_ordered_; }

    // For the counters of the sentinel protocol.
    KCCL_DEVICE ChannelState& state() { return state_; }

    // What a wait in this call is for.
    KCCL_DEVICE Awaited awaited() const {
        return {static_cast<uint32_t>(kernel_), channel_, state_.epoch};
    }

    // The coop agrees on whether the communicator could be used when this was opened: once, by all its
    // threads, before they know of each other. Also separates their reads at the opening from the
    // writes at the end.
    KCCL_DEVICE void check() {
        look();
        if (is_checked_) return;
        is_checked_ = true;
        if (coop_.any(found_ != kKcclOk)) fail();
    }
    // A call of nothing: whether one of something could be made. Called by all threads of the coop.
    KCCL_DEVICE Status none() {
        check();
        return status_;
    }
    // Whether this thread's warp found that it may be used, for what is sent before that.
    KCCL_DEVICE bool is_usable() const {
        return is_checked_ || !platform::warp_any(found_ != kKcclOk);
    }

    // Whether the next call may be entered by next_plain().
    KCCL_DEVICE bool is_next_plain() {
        look();
        return state_.epoch + step_ != special_;
    }

    // Enters the next call, a pairwise one, when it has nothing to wait for. Called by all threads of
    // the coop, after is_next_plain().
    KCCL_DEVICE void next_plain(KcclKernel kernel) {
        is_ordered_ &= kernel_ == kKcclNumKernels;
        kernel_ = kernel;
        state_.epoch += step_;
        offset_ ^= half_packets_;
        platform::enter_call(comm_.state, kernel, index_, state_.epoch);
    }

    // Enters any call. Called by all threads of the coop. On failure nothing may be sent.
    KCCL_DEVICE Status next(KcclKernel kernel, Exchange exchange) {
        check();
        const bool is_plain = is_next_plain();
        next_plain(kernel);
        if (!is_plain) {
            const Status entered = enter_special();
            if (entered != kKcclOk) return entered;
        }
        if (exchange == Exchange::kCredited) {
            state_.credit_due = 1;
            special_ = state_.epoch + step_;
            arrive<kCreditArrive>(kKcclFlagCredit);
        }
        return kKcclOk;
    }

    // Enters the next call, a pairwise one. False: this warp sends nothing and awaits nothing, and
    // leave(true) follows. Called by all threads of the coop; they agree in leave().
    KCCL_DEVICE bool enter(KcclKernel kernel) {
        if (!is_next_plain()) return next(kernel, Exchange::kPairwise) == kKcclOk;
        const bool usable = is_usable();
        next_plain(kernel);
        return usable;
    }

    // The next call is the last one that this kernel of the host's makes, and one that calls sent():
    // its end has nothing left to do.
    KCCL_DEVICE void expect_end() { is_ending_ = opening_ == Opening::kLaunch; }

    // What this thread sends in this call is on its way, and the state is what the next call needs.
    // Called by all threads of the coop, once a call that leave() ends.
    //
    // The blocks of calls that wait for this kernel's end come onto the device while this one polls; of
    // a chain of calls one call's, because that is past its own wait before it says the same. Not
    // earlier: at a kernel's beginning it gains nothing (bench/LOG.md).
    KCCL_DEVICE void sent() {
        if (has_dependent_) mem::launch_dependents();
        if (!is_ending_) return;
        // All have read it, and none reads it again. That this call may yet fail makes no difference:
        // only a reset, which forgets all, may follow.
        coop_.sync();
        if (leads(coop_)) store_state(channel_state(comm_, index_), state_);
        is_kept_ = true;
    }

    // Ends a call; true for `failed`: a wait of this thread has. Called by all threads of the coop,
    // all get the same status. A sync of the coop: any thread may use what any other stored. After
    // expect_end() neither: the kernel ends.
    KCCL_DEVICE Status leave(bool failed = false) {
        is_checked_ = true;
        if (is_ending_) {
            // Where threads that have entered the call are: see sent().
            if (!is_kept_) coop_.sync();
            if (!failed) return kKcclOk;
        } else {
            if (!coop_.any(failed)) return kKcclOk;
        }
        fail();
        return status_;
    }

    // See barrier.cuh; in this call.
    template <mem::Order order>
    KCCL_DEVICE void arrive(KcclFlag flag) {
        kccl::arrive<order>(coop_, comm_, index_, flag, state_.epoch);
    }

    template <mem::Order order>
    KCCL_DEVICE Status await(KcclFlag flag, int first, int last) {
        if (kccl::await<order>(coop_, comm_, index_, flag, awaited(), first, last) != kKcclOk)
            fail();
        return status_;
    }

    template <mem::Order order>
    KCCL_DEVICE Status await(KcclFlag flag) {
        return await<order>(flag, 0, world_size());
    }

  private:
    // In two pieces: four loads would be waited for one by one.
    KCCL_DEVICE static ChannelState load_state(const ChannelState* address) {
        const auto* const words = reinterpret_cast<const uint64_t*>(address);
        const uint64_t both[2] = {mem::load_plain(words), mem::load_plain(words + 1)};
        ChannelState state;
        static_assert(sizeof(state) == sizeof(both), "of two words");
        platform::copy_bytes(&state, both, sizeof(state));
        return state;
    }
    KCCL_DEVICE static void store_state(ChannelState* address, const ChannelState& state) {
        uint64_t both[2];
        platform::copy_bytes(both, &state, sizeof(state));
        auto* const words = reinterpret_cast<uint64_t*>(address);
        mem::store_plain(words, both[0]);
        mem::store_plain(words + 1, both[1]);
    }

    KCCL_DEVICE void keep_at_hand() {
        for (int k = 0; k < kMaxRanks<WORLD_SIZE> && k < world_size(); ++k) {
            outbox_[k] = mem::keep(outbox_[k]);
        }
        inbox_ = mem::keep(inbox_);
        thread_ = mem::keep(thread_);
        num_threads_ = mem::keep(num_threads_);
        step_ = mem::keep(step_);
        slot_packets_ = mem::keep(slot_packets_);
    }

    // Looks at what the opening asked for: here a thread waits for it.
    KCCL_DEVICE void look() {
        if (has_looked_) return;
        has_looked_ = true;
        offset_ = parity() * half_packets_;
        plan();
    }

    KCCL_DEVICE void fail() {
        status_ = status_of(comm_);
        special_ = state_.epoch + step_;
    }

    // Looks ahead for the next call that is not like the others, so that those make one comparison:
    // the second ever, the one after a credited call, and twice a period the one that scrubs.
    KCCL_DEVICE void plan() {
        constexpr uint32_t kHalfAPeriod = 0x80000000u;
        special_ = (state_.epoch & kHalfAPeriod) + kHalfAPeriod;
        const uint32_t next_epoch = state_.epoch + step_;
        if (state_.credit_due != 0 || state_.epoch == step_) special_ = next_epoch;
        if (state_.epoch == 0) special_ = next_epoch;
    }

    KCCL_DEVICE Status enter_special() {
        const uint32_t last_epoch = state_.epoch - step_;
        if (status_ != kKcclOk) return status_;
        // Once a channel, so that no other call pays for the store.
        if (last_epoch == step_ && leads(coop_)) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(&state_of(comm_)->contacted, 1u);
        }
        Status entered = kKcclOk;
        if ((state_.epoch << 1) == 0) {
            entered = scrub(coop_, comm_, index_, awaited());
        } else if (state_.credit_due != 0) {
            const Awaited credit = {static_cast<uint32_t>(kernel_), channel_, last_epoch};
            entered = kccl::await<kCreditAwait>(coop_, comm_, index_, kKcclFlagCredit, credit, 0,
                                                world_size());
        }
        state_.credit_due = 0;
        plan();
        if (entered != kKcclOk) fail();
        return entered;
    }

    const Coop coop_;
    const DeviceComm& comm_;
    const int channel_;
    const Opening opening_;
    int index_;
    // Of calls of even parity.
    mem::Packet* outbox_[kMaxRanks<WORLD_SIZE>];
    const mem::Packet* inbox_;
    uint32_t slot_packets_;  // of one source
    uint32_t half_packets_;  // of one parity
    uint32_t offset_;        // of this call's parity, in packets
    uint32_t thread_;
    uint32_t num_threads_;
    uint32_t step_;
    uint32_t special_;  // epoch of a call that has more to do than others
    bool has_looked_ = false;
    bool is_checked_ = false;
    KcclKernel kernel_ = kKcclNumKernels;  // of the last call; none yet
    bool is_ordered_;
    bool has_dependent_ = false;
    bool is_ending_ = false;
    bool is_kept_ = false;  // the state is, for the next to open the channel
    Status found_;          // at the opening, by this thread
    Status status_ = kKcclOk;
    ChannelState state_;
};

}  // namespace kccl
