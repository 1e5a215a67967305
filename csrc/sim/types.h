// Small types that all parts of the engine share.
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

// As in mem.cuh, which passes these values through the engine's table.
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

// Numbers the blocks of all ranks: a number is a slot of the vector clocks. A block has two slots:
// one for its threads, and behind it one for its asynchronous copies.
class Slots {
  public:
    struct Owner {
        int32_t rank;
        int32_t block;  // -1: the rank's host
    };

    // Returns the slot of a block. lane: a number that differs between launches of the rank that
    // may run at the same time.
    uint32_t of(int32_t rank, int32_t block, uint32_t lane);
    // Tells whether the slot is that of a block's asynchronous copies.
    static bool is_copier(uint32_t slot) { return slot % 2 != 0; }
    const Owner& operator[](uint32_t slot) const { return owners_[slot]; }
    void clear() {
        owners_.clear();
        by_lane_.clear();
    }
    // Returns the smallest scope that includes both.
    Scope between(uint32_t a, uint32_t b) const {
        if (a == b) return Scope::kBlock;
        return owners_[a].rank == owners_[b].rank ? Scope::kDevice : Scope::kSystem;
    }

  private:
    std::vector<Owner> owners_;
    std::map<std::pair<int32_t, uint32_t>, std::vector<uint32_t>> by_lane_;
};

// A call of a collective, so that an access can name the call it belongs to.
struct CallInfo {
    uint64_t state;  // address: the communicator
    uint32_t kernel;
    int32_t channel;  // -1: in no call
    uint32_t epoch;
    uint64_t number;  // like the epoch, but does not wrap; the same on all ranks
    uint64_t site;    // where the first thread of the rank began it
};

class Calls {
  public:
    Calls() { clear(); }
    void clear() {
        known_.assign(1, kNone);
        next_ = 1;
        last_.clear();
    }
    // Returns the call of this index. For index 0, and for calls that are long over: in no call.
    const CallInfo& operator[](uint32_t index) const {
        return next_ - index <= kKept ? known_[index % kKept] : kNone;
    }
    // Called when a thread enters a call on the rank of this state. All threads of the rank get the
    // same index.
    uint32_t enter(uint64_t state, uint32_t kernel, int32_t channel, uint32_t epoch, uint64_t site);
    void forget(uint64_t state);

  private:
    static constexpr CallInfo kNone = {0, 0, -1, 0, 0, 0};
    // The number of calls that are remembered, of all ranks and channels together.
    static constexpr uint32_t kKept = 1 << 16;

    // The last four calls of a channel on one rank. So many are kept because a thread may enter a
    // call that others of its rank have left. In exchanges it may even enter the call before
    // (GridExchange::await_previous), while a quick block is two calls further on.
    struct Last {
        struct Entered {
            uint32_t index = 0;
            uint32_t epoch = 0;
        };
        std::array<Entered, 4> entered;  // the latest one first
        uint64_t number = 0;
    };
    std::vector<CallInfo> known_;                        // call i is at i % kKept
    uint32_t next_ = 1;                                  // index of the next call
    std::map<std::pair<uint64_t, int32_t>, Last> last_;  // keyed by state and channel
};

// An event of a thread, for reports.
struct Deed {
    Event event = {};
    uint32_t call = 0;
    uint64_t site = 0;
    uint64_t step = 0;
    KcclSimEventKind kind = kKcclSimLoad;
    bool exists = false;
};

// Receives each finding.
class Reporter {
  public:
    virtual void report(KcclSimFindingKind kind, const Deed& deed, uint64_t address,
                        const Deed& other) = 0;

  protected:
    ~Reporter() = default;
};

}  // namespace kccl::sim
