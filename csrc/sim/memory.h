// The adversarial memory. It decides what a load may see, and which rules accesses break. MODEL.md
// is its contract.
//
// Real memory always has the newest value of every word. Besides, the simulator remembers, for
// words accessed through mem.cuh, the stores that a load may still return. A load gets the newest
// value or, where nothing orders it, an older one. Plain accesses go to real memory and are only
// checked: in a program without races they have no choice.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "choice.h"
#include "clock.h"
#include "types.h"

namespace kccl::sim {

// Knowledge, by the smallest scope that includes both the giver and the receiver.
using ByScope = std::array<ClockRef, 3>;

// What one thread knows, in three strengths (MODEL.md). `ordered` is happens-before: it needs a
// release and an acquire. `caused` needs neither: a load that decided about a store has returned
// before the store. `packets` is what else happens before, for packets only: see fence_packets().
struct Knowledge {
    Agent agent;
    uint32_t counter = 1;  // number of this thread's next event
    uint32_t call = 0;     // index in Calls of the call it makes
    uint64_t launch = 0;
    ClockRef ordered;
    ClockRef caused;
    // What `caused` will know too; joined before `caused` is used or handed on.
    std::vector<std::pair<Event, ClockRef>> hearsay;
    ByScope released;    // released by this thread's fences; later stores carry it
    ByScope to_acquire;  // what a fence would acquire
    ClockRef packets;
    ClockRef packets_released;    // as `released`, but carried by packets
    ClockRef packets_to_acquire;  // as `to_acquire`, by packets

    Event now() const { return {agent, counter}; }
    void hear(Event event, const ClockRef& caused);
    void settle_hearsay();
    // Returns what a release would hand on now. packets_snapshot(): what it would hand on to
    // packets.
    ClockRef snapshot() const;
    ClockRef packets_snapshot() const;
};

// Adds `known` to `released`, for all threads that the scope includes.
void hand_on(ByScope& released, Scope scope, const ClockRef& known);

// A thread's first load of these halves of a store.
struct Sight {
    Event reader = {};
    uint8_t halves = 3;
};

// A store that loads may return.
struct Record {
    uint64_t value = 0;  // value of all 8 bytes after this store
    Event writer = {};
    uint32_t index = 0;              // counts the granule's stores
    ByScope released = {};           // what the store carries; null: nothing
    ClockRef packets_released = {};  // what a packet of system scope carries besides
    ClockRef caused = {};
    uint32_t call = 0;
    uint8_t written = 3;  // which halves of 4 bytes it wrote, a bit each
    uint8_t halves = 3;   // in which of these a load may still return it
    Scope scope = Scope::kSystem;
    bool is_release = false;  // it releases, or follows a release of its thread
    bool is_update = false;   // it is part of a read-modify-write
    bool is_packet = false;
    bool is_plain = false;
    bool is_system_packet() const { return is_packet && scope == Scope::kSystem; }
    uint8_t skips = 0;  // how many loads passed it over
    uint64_t site = 0;
    uint64_t step = 0;
    std::vector<Sight> sights = {};  // who knows of one of these loads must see no older store
};

// An agent's last load of these halves of a granule.
struct Mark {
    // kPolled: part of a poll that is not over. kTaken: the thread went on with it. kRejected: it
    // did not.
    enum State : uint8_t { kPolled, kTaken, kRejected };

    Event reader = {};
    uint32_t index = 0;  // index of the record that it returned
    uint32_t call = 0;
    uint8_t halves = 3;
    State state = kPolled;
    bool is_packet = false;
    uint64_t site = 0;
    uint64_t step = 0;
};

// The last accesses of one kind by the threads of one block.
struct Access {
    Event event = {};  // the last one
    uint32_t call = 0;
    uint8_t bytes = 0;  // which bytes, a bit each
    bool is_async = false;
    enum Kind : uint8_t { kRead, kWrite, kLoad } kind = kRead;
    uint32_t last = 0;  // the greatest of `counters`
    uint64_t site = 0;
    uint64_t step = 0;
    // counter of each thread, 0 for none; empty: there is only `event`
    std::vector<uint32_t> counters = {};

    void add(Event next);
    // Tells whether adding this changes nothing.
    bool is_last_of(Event next) const {
        return next == event ||
               (next.agent.thread < counters.size() && counters[next.agent.thread] == next.counter);
    }
};

// 8 aligned bytes. Each half of 4 bytes has a history of its own; a store of both is in both.
struct Granule {
    uint64_t address = 0;
    uint64_t launch = 0;       // the last launch here; accesses of ended launches are forgotten
    uint32_t num_records = 0;  // number of stores so far
    uint32_t num_stores = 0;   // number of stores that a waiting thread could have noticed
    std::vector<Record> records;
    std::vector<Mark> marks;
    std::vector<Access> accesses;                // plain ones
    std::unique_ptr<std::vector<Access>> looks;  // loads that saw no thread's store
    std::vector<uint32_t> waiters;               // warps that look again after a store
    Event plain_writers[2];                      // the last one of each half
    uint8_t plainly_written = 0;                 // halves with a plain store not yet in `records`

    // Returns the position in `records` of the last store to any of these halves.
    size_t newest(uint8_t halves) const;
    // Returns the record with this index. Null: no load can return it any more.
    const Record* find(uint32_t index) const;
    // Returns how many stores to these halves came after the one at `position`.
    uint32_t newer_than(size_t position, uint8_t halves) const;
    void clear() {
        num_records = 0;
        records.clear();
        marks.clear();
        accesses.clear();
        if (looks) looks->clear();
        waiters.clear();
        plainly_written = 0;
    }
};

// A word that a thread has loaded, and its num_stores at that time.
struct Look {
    Granule* granule;
    uint32_t num_stores;
};

// How weak the memory is in a run. The seed chooses it.
struct Weakness {
    uint32_t old_per_256 = 0;  // how often a load passes over a store that it need not see
    uint8_t max_skips = 0;     // how often a store may be passed over before all see it
    enum Target : uint8_t { kAll, kPackets, kOthers, kOneRank } target = kAll;
    int32_t rank = 0;
};

class Memory {
  public:
    // The knowledge of the ranks' programs, which write to windows between their launches.
    ClockRef hosts;

    Memory(Slots& slots, Calls& calls, Reporter& reporter, const uint64_t& step)
        : slots_(slots), calls_(calls), reporter_(reporter), step_(step) {}

    // Forgets all that was accessed.
    void restart(const Weakness& weakness, uint64_t seed, Tape* tape, bool checks);

    struct Access32Or64 {
        uint64_t address;
        uint32_t num_bytes;  // 4 or 8
        Order order;
        Scope scope;
        uint64_t site;
        bool is_packet;

        bool is_system_packet() const { return is_packet && scope == Scope::kSystem; }
    };
    // The result of a load.
    struct Seen {
        uint64_t value;
        Granule* granule;
        bool is_newest;
        uint32_t age;
        Event writer;  // writer of the first half
    };
    Seen load(Knowledge& me, const Access32Or64& access);
    Granule* store(Knowledge& me, const Access32Or64& access, uint64_t value);
    // Reads the newest value and stores, in one step. kClaim: compare-and-swap of 0 to value.
    enum class Update { kClaim, kAdd };
    struct Updated {
        Granule* granule;
        uint32_t before;
        uint32_t after;
        bool is_stored;
    };
    Updated update(Knowledge& me, const Access32Or64& access, Update what, uint32_t value);
    void fence(Knowledge& me, Order order, Scope scope);
    // These make a fence of packets, or only its acquiring or its releasing half.
    static void fence_packets(Knowledge& me);
    static void acquire_packets(Knowledge& me);
    static void release_packets(Knowledge& me);

    void plain(Knowledge& me, uint64_t address, uint64_t num_bytes, bool is_write, uint64_t site) {
        plain_range(me, address, num_bytes, is_write, false, nullptr, site);
    }
    // Checks and records an access of an asynchronous copy. fenced: the ordinary stores that the
    // thread which started the copy had fenced before.
    void async(Knowledge& copy, const ClockRef& fenced, uint64_t address, uint64_t num_bytes,
               bool is_write, uint64_t site) {
        plain_range(copy, address, num_bytes, is_write, true, &fenced, site);
    }

    // Tells whether the thread knows of all plain writes to these bytes that threads of its block
    // have made before a call. If not, reports it. begun: for each thread of the block the number
    // of its last event before the call; 0: it is not in the call.
    bool knows_writes(const Knowledge& me, uint64_t address, uint64_t num_bytes,
                      const std::vector<uint32_t>& begun, uint64_t site);

    // Called when a poll is over. is_taken: whether it found what it waited for. The poll's loads
    // are polled[first] and those behind it.
    void settle(Knowledge& me, const std::vector<Look>& polled, size_t first, bool is_taken);

    Granule& granule(const Knowledge& me, uint64_t address);
    void forget(uint64_t address, uint64_t num_bytes);

    void add_window(int rank, uint64_t address, uint64_t num_bytes);
    void remove_window(uint64_t address);
    // Returns the bytes from an address to the end of its window; 0 if it lies in none (calls.cpp).
    uint64_t window_room(uint64_t address) const;
    void begin_launch(uint64_t launch) { launches_.push_back(launch); }
    void end_launch(uint64_t launch) { std::erase(launches_, launch); }

    uint64_t old_loads = 0, loads = 0, passed_stores = 0;

  private:
    static constexpr uint64_t kGranulesPerPage = 64;
    static constexpr uint64_t kPageBytes = kGranulesPerPage * 8;
    struct Page {
        uint64_t number = 0;
        uint32_t generation = 0;
        bool is_window = false;
        Granule granules[kGranulesPerPage];
    };
    struct Window {
        uint64_t address, num_bytes;
        int rank;
    };

    void plain_range(Knowledge& me, uint64_t address, uint64_t num_bytes, bool is_write,
                     bool is_async, const ClockRef* fenced, uint64_t site);
    void plain_one(Knowledge& me, Granule& granule, uint8_t bytes, bool is_write, bool is_async,
                   const ClockRef* fenced, uint64_t site);
    // Returns the access that this thread makes now.
    Deed doing(const Knowledge& me, KcclSimEventKind kind, uint64_t site) const {
        return {me.now(), me.call, site, step_, kind, true};
    }
    void check_plain(const Knowledge& me, Granule& granule, const Access32Or64& access,
                     KcclSimEventKind kind);
    void check_store(Knowledge& me, Granule& granule, const Access32Or64& access, uint64_t value);
    void check_writers(const Knowledge& me, Granule& granule, const Access32Or64& access,
                       const Record& before, uint8_t halves);
    // Adds the thread's access to `accesses`, which are sorted by slot. Threads of a block that
    // make the same kind of access share an entry.
    void add(std::vector<Access>& accesses, const Knowledge& me, Access::Kind kind, uint8_t bytes,
             bool is_async, uint64_t site);
    // Tells whether `access` contains an event that `clock` does not know, and which one.
    static bool is_unordered(const Access& access, const ClockRef& clock, Agent me, Event* which);
    void check_taken(Granule& granule, const Mark& mark);
    // Makes records of what plain stores, or the host, have written to real memory.
    void refresh(Granule& granule) {
        // Atomic, because another OS thread, which runs a rank's program, may write meanwhile.
        const uint64_t real =
            __atomic_load_n(reinterpret_cast<const uint64_t*>(granule.address), __ATOMIC_RELAXED);
        if (granule.records.empty() || granule.records.back().value != real) {
            take_over(granule, real);
        }
        granule.plainly_written = 0;
    }
    void take_over(Granule& granule, uint64_t real);
    size_t choose(Knowledge& me, Granule& granule, uint8_t halves, const Access32Or64& access);
    static bool must_see(const Knowledge& me, const Record& record, uint8_t halves,
                         const Access32Or64& access);
    // Tells whether the record comes before this access of the thread, by `ordered` or `packets`.
    static bool comes_before(const Knowledge& me, const Record& record,
                             const Access32Or64& access) {
        if (knows(me.ordered, record.writer)) return true;
        return record.is_system_packet() && access.is_system_packet() &&
               knows(me.packets, record.writer);
    }
    bool hides(const Record& record);
    void see(Knowledge& me, Granule& granule, size_t position, uint8_t halves,
             const Access32Or64& access);
    static void append(Granule& granule, Record record);
    static void make_room(Granule& granule, uint8_t halves);
    void put(Knowledge& me, Granule& granule, const Access32Or64& access, uint64_t value,
             ByScope released, bool is_release);
    ClockRef& sequential(Agent agent, Scope scope);
    Page& page(uint64_t number);
    void clear(Page& page);
    bool is_window(uint64_t page) const;
    bool is_running(uint64_t launch) const {
        return std::find(launches_.begin(), launches_.end(), launch) != launches_.end();
    }

    Slots& slots_;
    Calls& calls_;
    Reporter& reporter_;
    const uint64_t& step_;
    Weakness weakness_;
    Random random_;
    Tape* tape_ = nullptr;
    bool checks_ = true;
    uint32_t generation_ = 1;
    static constexpr uint64_t kRecentPages = 1024;

    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
    Page* recent_[kRecentPages] = {};
    std::vector<Window> windows_;
    std::vector<uint64_t> launches_;  // numbers of launches that run, or whose dependents do
    // What sequentially consistent fences hand on, by scope and by block or device.
    std::map<std::pair<Scope, uint32_t>, ClockRef> sequential_;
    // The last store that was passed over; to notice when stores overtake each other.
    Event passed_over_;
};

}  // namespace kccl::sim
