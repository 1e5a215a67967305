// Small types that all parts of the simulator share.
#pragma once

#include <stdint.h>

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "../include/kccl/abi.h"

extern "C" {
#include "../host/api.inc"
#include "api.inc"
}

#include "clock.h"

namespace kccl::sim {

// Orders and scopes of accesses. The numbers are those of mem::Order and mem::Scope in mem.cuh,
// because kernels pass these through the engine's table.
enum class Order : uint8_t {
    kRelaxed = kKcclSimOrderRelaxed,
    kAcquire = kKcclSimOrderAcquire,
    kRelease = kKcclSimOrderRelease,
    kAcqRel = kKcclSimOrderAcqRel,
    kSeqCst = kKcclSimOrderSeqCst
};
enum class Scope : uint8_t {
    kBlock = kKcclSimScopeBlock,
    kDevice = kKcclSimScopeDevice,
    kSystem = kKcclSimScopeSystem
};

// Gives each block of each rank its slots: numbers by which the vector clocks (clock.h) count its
// threads. A block has two slots, one for its threads and the next one for its asynchronous copies.
class Slots {
  public:
    struct Owner {
        int32_t rank;
        int32_t block;  // -1: the rank's host
    };

    // Returns the slot of a block's threads. lane: a number that differs between launches of the
    // rank that may run at the same time, so that their blocks have different slots. Other launches
    // use the same slots again.
    uint32_t of(int32_t rank, int32_t block, uint32_t lane);
    // Tells whether the slot is that of a block's asynchronous copies.
    static bool is_copier(uint32_t slot) { return slot % 2 != 0; }
    const Owner& operator[](uint32_t slot) const { return owners_[slot]; }
    void clear() {
        owners_.clear();
        by_lane_.clear();
    }
    // Returns the smallest scope that includes the threads of both slots.
    Scope between(uint32_t a, uint32_t b) const {
        if (a == b) return Scope::kBlock;
        return owners_[a].rank == owners_[b].rank ? Scope::kDevice : Scope::kSystem;
    }

  private:
    std::vector<Owner> owners_;
    std::map<std::pair<int32_t, uint32_t>, std::vector<uint32_t>> by_lane_;
};

// A call of a collective, so that findings can name the call to which an access belongs.
struct CallInfo {
    uint64_t state;  // address: the communicator
    uint32_t kernel;
    int32_t channel;  // -1: in no call
    uint32_t epoch;
    uint64_t number;  // like the epoch, but does not wrap; the same on all ranks
    uint64_t site;    // where the first thread of the rank began it; 0 if not known
};

// The last calls of all ranks, by an index that accesses store.
class Calls {
  public:
    Calls() { clear(); }
    void clear() {
        known_.assign(1, kNone);
        next_ = 1;
        last_.clear();
    }
    // Returns the call with this index. For index 0 (no call), and for calls that are no longer
    // remembered, returns kNone.
    const CallInfo& operator[](uint32_t index) const {
        return next_ - index <= kKept ? known_[index % kKept] : kNone;
    }
    // Called when a thread enters a call on the communicator with this KcclState, of which each
    // rank has its own. Returns the call's index, which is the same for all threads of the rank.
    uint32_t enter(uint64_t state, uint32_t kernel, int32_t channel, uint32_t epoch, uint64_t site);
    void forget(uint64_t state);

  private:
    static constexpr CallInfo kNone = {0, 0, -1, 0, 0, 0};
    // The number of calls that are remembered, of all ranks and channels together.
    static constexpr uint32_t kKept = 1 << 16;

    // The last four calls of a channel on one rank. One is not enough, because a thread may enter a
    // call that other threads of its rank have left already. In exchanges it may even enter the
    // call before that (GridExchange::await_previous), while a quick block is two calls further on.
    struct Last {
        struct Entered {
            uint32_t index = 0;
            uint32_t epoch = 0;
        };
        std::array<Entered, 4> entered;  // the latest one first
        uint64_t number = 0;             // CallInfo::number of the latest one
    };
    std::vector<CallInfo> known_;                        // call i is at i % kKept
    uint32_t next_ = 1;                                  // index of the next call
    std::map<std::pair<uint64_t, int32_t>, Last> last_;  // keyed by state and channel
};

// An access, call or other step of a thread, as findings report it.
struct Deed {
    Event event = {};
    uint32_t call = 0;  // index in Calls of the call in which it was done
    uint64_t site = 0;  // return address in the kernel's code
    uint64_t step = 0;  // the run's step at which it was done
    KcclSimEventKind kind = kKcclSimLoad;
    bool exists = false;  // false if there is no such step
};

// Receives findings. deed: what is wrong, at `address`. other: the earlier deed with which it
// conflicts, if there is one.
class Reporter {
  public:
    virtual void report(KcclSimFindingKind kind, const Deed& deed, uint64_t address,
                        const Deed& other) = 0;

  protected:
    ~Reporter() = default;
};

}  // namespace kccl::sim
