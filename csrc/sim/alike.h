// Calls that all ranks must make alike, and channels that only one coop may have open.
#pragma once

#include <stdint.h>

#include <map>
#include <set>
#include <utility>

#include "../include/kccl/targets/sim_device.h"
#include "types.h"

namespace kccl::sim {

// A call that a rank or a block has made.
struct Made {
    KcclSimMade what = {};
    Deed deed;
};

// The calls that some ranks have made and others have not yet, by stream of calls. On a channel the
// n-th calls of all ranks belong together, empty ones included. In exchanges of the grid the calls
// of one epoch belong together.
class Alike {
  public:
    void clear() { streams_.clear(); }
    // Called when the communicator with this KcclState starts anew.
    void forget(uint64_t state);
    // Compares a call with the one that the first rank or block made at its place in the sequence.
    // Returns that one if the two differ, otherwise null. `mine` is kept for those who come later.
    const Made* compare(const KcclSimCall& call, const Made& mine);
    // Finds two ranks that make the same call on different channels, when no thread can go on: each
    // rank of some communicator has made one call that others have not, and these calls are alike.
    // Returns null pointers if there are none.
    std::pair<const Made*, const Made*> crossed() const;
    // Visits the channels on which some ranks have made more calls than others: for each rank of
    // the communicator visit(rank, number of its calls, the last of them or null).
    template <class Visit>
    void visit_uneven(Visit visit) const {
        for (const auto& [key, stream] : streams_) {
            if (key.second < 0) continue;
            const auto count = [&stream](uint32_t rank) {
                const auto at = stream.calls.find(rank);
                return at == stream.calls.end() ? uint64_t{0} : at->second;
            };
            bool is_even = true;
            for (uint32_t rank = 1; rank < stream.world_size; ++rank) {
                is_even = is_even && count(rank) == count(0);
            }
            for (uint32_t rank = 0; !is_even && rank < stream.world_size; ++rank) {
                const auto last = stream.last.find(rank);
                visit(rank, count(rank), last == stream.last.end() ? nullptr : &last->second);
            }
        }
    }

  private:
    struct Pending {
        Made first;
        uint32_t callers = 0;  // number of ranks or blocks that have made it
        uint32_t ranks = 0;    // the ranks that have made it, a bit each
    };
    struct Stream {
        std::map<uint32_t, uint64_t> calls;  // rank -> how many it has made on a channel
        std::map<uint32_t, Made> last;       // rank -> the last of these
        uint32_t world_size = 0;
        std::set<uint64_t> states;
        std::map<uint64_t, Pending> pending;  // keyed by number or epoch
    };
    std::map<std::pair<uint64_t, int32_t>, Stream> streams_;  // keyed by memory and stream
    Made found_;
};

// The channels that are open, by the threads of the coop that has opened them.
class Openings {
  public:
    void clear() { open_.clear(); }
    // Opens a channel. Returns who has it open already; null if nobody has. `slot`: the slot of the
    // thread's block.
    const Made* open(const KcclSimOpening& opening, uint32_t slot, uint32_t thread,
                     const Made& mine);
    // Closes a channel. Does nothing if another coop has it open, or nobody.
    void close(const KcclSimOpening& opening, uint32_t slot, uint32_t thread);

  private:
    struct Open {
        Made by;
        uint32_t slot;
        uint32_t first_thread;
        uint32_t num_threads;
        std::set<uint32_t> threads;

        bool is_by(const KcclSimOpening& opening, uint32_t its_slot) const {
            return slot == its_slot && first_thread == opening.first_thread &&
                   num_threads == opening.num_threads;
        }
    };
    std::map<std::pair<uint64_t, int32_t>, Open> open_;  // keyed by memory and scratch channel
};

}  // namespace kccl::sim
