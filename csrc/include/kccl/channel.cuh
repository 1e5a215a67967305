// A channel: one stream of calls, its epochs and its two slots, and why a slot may be used again.
//
// Call e uses the slots of its parity. They were last used by call e-2. So before a rank pushes
// anything in call e it must know that every peer has left e-2, that is, has entered e-1:
//   - a pairwise call ends only when every peer's words of that call have arrived. So after a
//     pairwise call e-1 the rank knows this;
//   - any other call, as a broadcast by packets, sends a credit "I have entered e-1" to every peer
//     at its start and does not wait for the peers' credits. The call after it waits for them; by
//     then they have usually arrived.
// Every call ends with a sync of the coop, in leave() or in await(), or with its kernel. That
// separates the coop's reads in call e-1 from its writes in call e. So the argument holds for all
// its threads, whatever the length and the kind of the two calls.
//
// Epochs wrap, and twice a period the channel is scrubbed (scrub.cuh). Between calls a channel's
// state stays in registers. Only its opening is expensive, so a kernel of many calls opens it once.
//
// csrc/models/packets.pml models calls, credits and scrubs, for two and three ranks, and
// tests/csrc/test_spin_models.py tries all runs of that model. It leaves out failures, and that
// channels are closed and opened; the simulator tests these.
#pragma once

#include "credited_call.cuh"
#include "dependent_launch.cuh"
#include "failure_latch.cuh"
#include "opening.cuh"
#include "scrub.cuh"
#include "told.cuh"

namespace kccl {

enum class Exchange {
    kPairwise,  // the call ends only when this rank has seen a word of every peer
    kCredited   // the call may end earlier, so it sends every peer a credit
};

// On CPUs peers pull from a rank's slots, so their reads must be ordered before their credit.
constexpr mem::Order kCreditArrive = platform::kCpu ? mem::Order::kRelease : mem::Order::kRelaxed;
constexpr mem::Order kCreditAwait = platform::kCpu ? mem::Order::kAcquire : mem::Order::kRelaxed;

// The purpose for which a channel is opened.
enum class Opening {
    kManyCalls,  // opening may take longer so that calls are shorter
    kOneCall,    // the constructor does not wait for its loads; the first call does
    kLaunch      // as kOneCall, in a kernel that the host launches for one call
};

// A coop's stream of calls on one channel. All threads of the coop open it, make the same calls and
// close it together. On each rank only one coop at a time may have a channel open. All ranks make
// the same calls on it, in the same order.
//
// WORLD_SIZE: the communicator's world size, so that loops over ranks unroll; 0 for any size.
template <class Coop, int WORLD_SIZE = 0>
class Channel {
  public:
    // Opens a channel. `channel`: below comm.num_channels. `block`: this block's number, below
    // comm.blocks_per_channel, in a call that several blocks make, each on its part of the channel.
    // If one is out of range, or WORLD_SIZE is not comm's, every call returns a failed status and
    // sends nothing. `comm` must outlive this object.
    KCCL_DEVICE Channel(Coop coop, const DeviceComm& comm, int channel, int block = 0,
                        Opening opening = Opening::kManyCalls)
        : coop_(coop), comm_(comm), channel_(channel), launch_(opening == Opening::kLaunch) {
        // The host has already checked the arguments of calls that it launches.
        const bool is_checked = opening != Opening::kLaunch;
        if (is_checked && !may_open<WORLD_SIZE>(comm, channel, block)) {
            if (leads(coop)) refuse_opening<WORLD_SIZE>(comm, channel, block);
            latch_.refuse();
        } else {
            index_ = channel * comm.blocks_per_channel + block;
            if (is_checked) told::channel_opens(coop, comm, channel, index_);
            latch_.ask(comm);
            state_ = mem::load_words(channel_state(comm, index_));
        }
        for (int k = 0; k < kMaxRanks<WORLD_SIZE> && k < world_size(); ++k) {
            outbox_[k] = packet_slot(comm, receiver(k), index_, 0, comm.rank);
        }
        inbox_ = packet_slot(comm, comm.rank, index_, 0, 0);
        thread_ = coop.index();
        num_threads_ = coop.size();
        step_ = comm.epoch_step;
        slot_packets_ = static_cast<uint32_t>(comm.layout.packet_bytes / kPayloadBytes);
        const bool many_calls = opening == Opening::kManyCalls;
        if (many_calls) {
            begin_together<kCoopKind<Coop>>(comm, "Channel",
                                            {{"channel", static_cast<uint64_t>(index_)}});
        }
        if (many_calls) keep_at_hand();
        half_packets_ = world_size() * slot_packets_;
        if (many_calls) check();
    }

    KCCL_DEVICE explicit Channel(Coop coop, const DeviceComm& comm)
        : Channel(coop, comm, default_channel(coop)) {}

    // Opens a channel in a kernel that the host launches for one call. bytes_per_count: the bytes
    // of the message for each unit of call.count, for checks that compare calls.
    KCCL_DEVICE explicit Channel(const Call& call, uint64_t bytes_per_count = 0)
        : Channel(Coop(), call.comm, call.channel, platform::block_in_grid(), Opening::kLaunch) {
        if constexpr (platform::kComparesCalls) {
            call_ = &call;
            bytes_per_count_ = bytes_per_count;
        }
        if constexpr (told::kIsTold) {
            tell({call.kernel, call.count * bytes_per_count, call.dtype, call.op, call.peer});
        }
        launch_.set_dependent(call.dependent == kKcclEarlyDependent);
    }

    // Stores what the next opening of the channel must know.
    KCCL_DEVICE ~Channel() {
        // Comes before the sync below, after which another coop may open the channel.
        if (!launch_.is_launch()) told::channel_closes(coop_, comm_, channel_, index_);
        // After a failure nothing is stored: only reset() may follow, and it clears everything.
        if (launch_.is_stored() || status() != kKcclOk || kernel_ == kKcclNumKernels) return;
        store_state();
        // At the end of a kernel no sync is needed: the end orders what a sync would order.
        if (!launch_.is_launch()) coop_.sync();
    }

    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    KCCL_DEVICE Coop coop() const { return coop_; }
    // Return the coop's index() and size(), from registers.
    KCCL_DEVICE uint32_t thread() const { return thread_; }
    KCCL_DEVICE uint32_t num_threads() const { return num_threads_; }
    KCCL_DEVICE const DeviceComm& comm() const { return comm_; }
    KCCL_DEVICE int world_size() const { return WORLD_SIZE > 0 ? WORLD_SIZE : comm_.world_size; }
    // Returns the number of the scratch channel: each block of a channel has its own.
    KCCL_DEVICE int index() const { return index_; }
    // Returns the most bytes that the message of a call may have.
    KCCL_DEVICE uint64_t max_bytes() const { return uint64_t{slot_packets_} * kPayloadBytes; }
    KCCL_DEVICE uint32_t epoch() const { return state_.epoch; }
    KCCL_DEVICE uint32_t parity() const { return (state_.epoch & comm_.epoch_step) != 0 ? 1 : 0; }
    KCCL_DEVICE Status status() const { return latch_.status(); }

    // Returns the k-th rank to send to: first the peers, from the rank after this one, last itself.
    KCCL_DEVICE int receiver(int k) const {
        const int rank = comm_.rank + 1 + k;
        return rank < world_size() ? rank : rank - world_size();
    }
    // Returns the address of packet i of this call in receiver(k)'s scratch.
    KCCL_DEVICE mem::Packet* outbox(int k, uint32_t i) const { return outbox_[k] + (offset_ + i); }
    // Returns the address in this rank's scratch of packet i from `source`, which may be itself.
    KCCL_DEVICE const mem::Packet* inbox(int source, uint32_t i) const {
        return inbox_ + (offset_ + source * slot_packets_ + i);
    }

    // Tells whether this rank describes its calls to its peers (description.cuh): if this target
    // compares calls and the host launched this one.
    KCCL_DEVICE bool is_described() const { return platform::kComparesCalls && call_ != nullptr; }
    // Returns the description of this rank's call.
    KCCL_DEVICE Description description() const {
        return {call_->count * bytes_per_count_, state_.epoch, call_in_bits(*call_)};
    }

    // Tells whether this call needs no fence before it sends: see DependentLaunch.
    KCCL_DEVICE bool is_ordered() const { return launch_.is_ordered(); }

    // Returns the channel's state, in which the sentinel protocol keeps counters of its own.
    KCCL_DEVICE ChannelState& state() { return state_; }

    // Tells the simulator that this rank makes this call next. Called by all threads of the coop.
    KCCL_DEVICE void tell(told::Call call) const {
        if constexpr (told::kIsTold) {
            call.num_blocks = grid_blocks_;
            // After a failure no call is made.
            if (leads(coop_) && latch_.is_ok()) {
                told::call_begins(comm_, channel_, index_, call);
            }
        }
    }
    // Notes that all blocks of the grid make each call together, each on its own channel. Later
    // calls of tell() pass their number to the simulator.
    KCCL_DEVICE void tell_of_grid() { grid_blocks_ = platform::blocks_per_grid(); }

    // Returns the purpose of a wait in this call, for the record if it fails.
    KCCL_DEVICE Awaited awaited() const {
        return {kernel_, channel_, state_.epoch, Need::kEach, is_described()};
    }

    // Lets the coop vote on whether the communicator had failed at the opening: see FailureLatch.
    // Called by all threads of the coop, before they rely on each other.
    KCCL_DEVICE void check() {
        look();
        if (!latch_.agree(coop_)) fail();
    }
    // Makes a call of no elements: sends nothing, and returns the channel's status. Called by all
    // threads of the coop.
    KCCL_DEVICE Status none() {
        check();
        return status();
    }
    // Tells whether this thread's warp may send before the coop has voted in check().
    KCCL_DEVICE bool is_usable() const { return latch_.is_usable(); }

    // Tells whether the next call may be entered by next_plain(): it has nothing to wait for.
    KCCL_DEVICE bool is_next_plain() {
        look();
        return state_.epoch + step_ != special_;
    }

    // Enters the next call, which is pairwise. The caller has seen is_next_plain() return true.
    // Called by all threads of the coop.
    KCCL_DEVICE void next_plain(uint32_t kernel) {
        launch_.begin_call(kernel_);
        kernel_ = kernel;
        state_.epoch += step_;
        offset_ ^= half_packets_;
        platform::enter_call(comm_.state, kernel, index_, state_.epoch);
    }

    // Enters the next call, of any kind. Called by all threads of the coop. If the status is not
    // ok, the coop must send nothing.
    KCCL_DEVICE Status next(uint32_t kernel, Exchange exchange) {
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
            if constexpr (platform::kCpu) {
                describe();
                if (is_described()) {
                    describe_to_peers(coop_, comm_, index_, kKcclFlagCredit, description());
                }
            }
            arrive<kCreditArrive>(kKcclFlagCredit);
        }
        return kKcclOk;
    }

    // Enters the next call, a pairwise one. Called by all threads of the coop. Returns false if a
    // thread of this warp found a failure. The warp then sends and awaits nothing, and calls
    // leave(true).
    KCCL_DEVICE bool enter(uint32_t kernel) {
        if (!is_next_plain()) return next(kernel, Exchange::kPairwise) == kKcclOk;
        const bool usable = is_usable();
        next_plain(kernel);
        return usable;
    }

    // Announces that the next call is the last one of a kernel that the host launched, and that it
    // calls sent().
    KCCL_DEVICE void expect_end() { launch_.expect_end(); }

    // Announces that this thread has sent all that it sends in this call, and that state() is what
    // the next call needs. Called by all threads of the coop, once in a call that leave() ends. See
    // DependentLaunch.
    KCCL_DEVICE void sent() {
        // The description is sent behind the packets, where it costs no time.
        describe();
        if (launch_.sent(coop_)) store_state();
    }

    // Ends a call. failed: whether a wait of this thread has failed. Called by all threads of the
    // coop, which all get the same status. It is also a sync of the coop, so any thread may use
    // what any other stored. After expect_end() there is no sync and no common status, because the
    // kernel ends.
    KCCL_DEVICE Status leave(bool failed = false) {
        latch_.skip_vote();
        if (launch_.is_ending()) {
            // The threads that entered the call wait in the sync of sent(). This thread did not
            // enter it, so it joins them here.
            if (!launch_.is_stored()) coop_.sync();
            if (!failed) return kKcclOk;
        } else {
            if (!coop_.any(failed)) return kKcclOk;
        }
        fail();
        return status();
    }

    // Stores the description of this call (description.cuh) in this rank's own line. After a
    // failure stores nothing, because the communicator may be closed and its memory gone.
    KCCL_DEVICE void describe() {
        if constexpr (platform::kCpu) {
            if (is_described() && is_usable()) kccl::describe(comm_, index_, description());
        }
    }

    // Calls the function of this name in barrier.cuh, with this call's epoch.
    template <mem::Order order>
    KCCL_DEVICE void arrive(KcclFlag flag) {
        kccl::arrive<order>(coop_, comm_, index_, flag, state_.epoch);
    }

    template <mem::Order order>
    KCCL_DEVICE Status await(KcclFlag flag, int first, int last) {
        if (kccl::await<order>(coop_, comm_, index_, flag, awaited(), first, last) != kKcclOk)
            fail();
        return status();
    }

    template <mem::Order order>
    KCCL_DEVICE Status await(KcclFlag flag) {
        return await<order>(flag, 0, world_size());
    }

  private:
    KCCL_DEVICE void store_state() const {
        if (leads(coop_)) mem::store_words(channel_state(comm_, index_), state_);
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

    // The first call uses here what the constructor has loaded, and so waits for those loads.
    KCCL_DEVICE void look() {
        if (has_looked_) return;
        has_looked_ = true;
        offset_ = parity() * half_packets_;
        find_special();
    }

    KCCL_DEVICE void fail() {
        latch_.fail(comm_, channel_);
        special_ = state_.epoch + step_;
    }

    // Computes the next epoch at which a call takes the slow path, enter_special(): one of the
    // first two calls ever, the call after a credited one, and, twice a period, the call that
    // scrubs. All other calls make only one comparison.
    KCCL_DEVICE void find_special() {
        constexpr uint32_t kHalfAPeriod = 0x80000000u;
        special_ = (state_.epoch & kHalfAPeriod) + kHalfAPeriod;
        const uint32_t next_epoch = state_.epoch + step_;
        if (state_.credit_due != 0 || state_.epoch == step_) special_ = next_epoch;
        if (state_.epoch == 0) special_ = next_epoch;
    }

    KCCL_DEVICE Status enter_special() {
        const uint32_t last_epoch = state_.epoch - step_;
        // After a failure the next call takes this path too.
        if (status() != kKcclOk) {
            special_ = state_.epoch + step_;
            return status();
        }
        // Sets KcclState.contacted after the first call, here where no other call pays for it.
        if (last_epoch == step_ && leads(coop_)) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(&state_of(comm_)->contacted, 1u);
        }
        Status entered = kKcclOk;
        if ((state_.epoch << 1) == 0) {
            entered = scrub(coop_, comm_, index_, awaited());
        } else if (state_.credit_due != 0) {
            const Awaited credit = {kernel_, channel_, last_epoch, Need::kEach, is_described()};
            entered = kccl::await<kCreditAwait>(coop_, comm_, index_, kKcclFlagCredit, credit, 0,
                                                world_size());
            if constexpr (platform::kCpu) {
                if (entered == kKcclOk && is_described()) {
                    entered = compare_credited(comm_, index_, credit);
                }
            }
        }
        state_.credit_due = 0;
        find_special();
        if (entered != kKcclOk) fail();
        return entered;
    }

    const Coop coop_;
    const DeviceComm& comm_;
    const int channel_;
    int index_ = 0;
    // Addresses of the packet slots in calls of even parity.
    mem::Packet* outbox_[kMaxRanks<WORLD_SIZE>];
    const mem::Packet* inbox_;
    uint32_t slot_packets_;  // the most packets from one source in a call
    uint32_t half_packets_;  // the most packets from all sources in a call
    uint32_t offset_ = 0;    // distance in packets from the addresses above to the slots of this
                             // call
    uint32_t thread_;
    uint32_t num_threads_;
    uint32_t step_;
    uint32_t special_ = 0;  // the next epoch at which a call takes the slow path
    bool has_looked_ = false;
    // The call as the host launched it, which outlives this object; null if it is not described.
    const Call* call_ = nullptr;
    uint64_t bytes_per_count_ = 0;
    uint32_t grid_blocks_ = 0;           // blocks of the grid that makes the calls, for tell()
    uint32_t kernel_ = kKcclNumKernels;  // KcclKernel of the last call, once there was one
    DependentLaunch launch_;
    FailureLatch latch_;
    ChannelState state_ = {};
};

}  // namespace kccl
