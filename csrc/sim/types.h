// Small types that all parts of the engine share.
#pragma once

#include <stdint.h>

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

// As in mem.cuh, whose values the engine's table gets.
enum class Order : uint32_t { kRelaxed, kAcquire, kRelease, kAcqRel, kSeqCst };
enum class Scope : uint32_t { kBlock, kDevice, kSystem };

// Which block of which rank a slot is. A block has two: its threads', and behind it that of what
// copies for it asynchronously.
class Slots {
  public:
    struct Place {
        int32_t rank;
        int32_t block;  // -1: the rank's host
    };

    uint32_t of(int32_t rank, int32_t block);
    const Place& operator[](uint32_t slot) const { return places_[slot]; }
    void clear() {
        places_.clear();
        by_rank_.clear();
    }
    // The smallest scope that takes in both.
    Scope between(uint32_t a, uint32_t b) const {
        if (a == b) return Scope::kBlock;
        return places_[a].rank == places_[b].rank ? Scope::kDevice : Scope::kSystem;
    }

  private:
    std::vector<Place> places_;
    std::vector<std::vector<uint32_t>> by_rank_;
};

// Calls of collectives, so that an access can name the one it belongs to.
struct CallInfo {
    uint64_t state;  // address: the communicator
    uint32_t kernel;
    int32_t channel;  // -1: in no call
    uint32_t epoch;
    uint64_t number;  // counts up where epochs wrap; the same on all ranks
};

class Calls {
  public:
    Calls() { clear(); }
    void clear() {
        known_.assign(1, CallInfo{0, 0, -1, 0, 0});
        last_.clear();
    }
    const CallInfo& operator[](uint32_t index) const { return known_[index]; }
    // The call that the rank of this state has entered; the same index for all its threads.
    uint32_t enter(uint64_t state, uint32_t kernel, int32_t channel, uint32_t epoch);
    void forget(uint64_t state);

  private:
    std::vector<CallInfo> known_;
    std::map<std::pair<uint64_t, int32_t>, uint32_t> last_;  // by state and channel
};

// Where findings go.
class Reporter {
  public:
    struct Other {
        Event event;
        uint32_t call = 0;
        uint64_t site = 0;
        bool exists = false;
    };
    virtual void report(KcclSimFindingKind kind, Agent agent, uint32_t call, uint64_t site,
                        uint64_t address, const Other& other) = 0;

  protected:
    ~Reporter() = default;
};

}  // namespace kccl::sim
