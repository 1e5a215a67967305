// Checks calls that all ranks must make alike, and channels that only one coop at a time may open.
#pragma once

#include <stdint.h>

#include <map>
#include <set>
#include <utility>

#include "../include/kccl/targets/sim_device.h"
#include "types.h"

namespace kccl::sim {

// A call that a rank or a block has made, which thread made it, and where in the code.
struct Made {
    KcclSimMade what = {};
    Deed deed;
};

// Keeps the calls that some ranks have made and others have not yet, for each stream of calls: a
// channel, or an exchange between the blocks of grids (KcclSimCall). On a channel the n-th calls of
// all ranks must be alike, calls of no bytes included. In an exchange the calls of one epoch must
// be alike.
class Alike {
  public:
    void clear() { streams_.clear(); }
    // Forgets the calls of the communicator with this KcclState. Called when it has been reset.
    void forget(uint64_t state);
    // Compares a call with the call that the first rank or block made at the same place in the
    // stream. Returns the first call if the two differ, otherwise null. If `mine` is itself the
    // first, keeps it for the comparison with later ones.
    const Made* compare(const KcclSimCall& call, const Made& mine);
    // Called when no thread can go on. Finds the mistake that ranks of a communicator make the same
    // call on different channels: there, on each channel, some ranks have made a call that others
    // have not, no rank is among them twice, and these calls are alike. Returns two of the calls,
    // or null pointers if there is no such mistake.
    std::pair<const Made*, const Made*> crossed() const;
    // Visits the channels on which some ranks have made more calls than others. For each of them
    // and for each rank of the communicator, calls visit(rank, how many calls the rank has made on
    // the channel, the last of these calls or null).
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
    // A call that some ranks or blocks have made and others have not.
    struct Pending {
        Made first;            // the call as the first rank or block made it
        uint32_t callers = 0;  // number of ranks or blocks that have made it
        uint32_t ranks = 0;    // the ranks that have made it, a bit each
    };
    struct Stream {
        std::map<uint32_t, uint64_t> calls;   // rank -> how many calls it has made on the channel
        std::map<uint32_t, Made> last;        // rank -> the last of these calls
        uint32_t world_size = 0;              // of the communicator; 0 if this is an exchange
        std::set<uint64_t> states;            // the KcclState of each rank that has made a call
        std::map<uint64_t, Pending> pending;  // keyed by the call's number; in exchanges its epoch
    };
    // Keyed by KcclSimCall's memory and stream.
    std::map<std::pair<uint64_t, int32_t>, Stream> streams_;
    Made found_;  // the call to which compare() returns a pointer
};

// Keeps which channels are open. All threads of a coop open a channel together, each by a call of
// open().
class Openings {
  public:
    void clear() { open_.clear(); }
    // Opens a channel for a thread. If another coop has it open, or the thread itself, returns who
    // opened it; otherwise returns null. slot: the slot of the thread's block (see Agent).
    const Made* open(const KcclSimOpening& opening, uint32_t slot, uint32_t thread,
                     const Made& mine);
    // Closes a channel for a thread. Does nothing if the thread's coop has not opened the channel.
    void close(const KcclSimOpening& opening, uint32_t slot, uint32_t thread);

  private:
    struct Open {
        Made by;  // the coop's first thread that has opened the channel
        uint32_t slot;
        uint32_t first_thread;
        uint32_t num_threads;
        std::set<uint32_t> threads;  // the coop's threads that have it open

        bool is_by(const KcclSimOpening& opening, uint32_t its_slot) const {
            return slot == its_slot && first_thread == opening.first_thread &&
                   num_threads == opening.num_threads;
        }
    };
    // Keyed by KcclSimOpening's memory and index.
    std::map<std::pair<uint64_t, int32_t>, Open> open_;
};

}  // namespace kccl::sim
