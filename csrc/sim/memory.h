// The memory of the simulator. Where the GPU's memory model allows it, a load may get an old value,
// by a random choice. Accesses that break a rule are found. MODEL.md says what the memory does and
// why.
//
// Real memory always has the newest value of every word. In addition, for words accessed through
// mem.cuh, the simulator remembers the last stores, which a load may still return. A load gets the
// newest value, or an older one if nothing orders the newer stores before the load. Plain accesses
// go to real memory and are only checked: in a program without races they must return the newest
// value.
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

// Three clocks that a thread hands on, indexed by Scope: each is for the threads for which this is
// the smallest scope that includes both them and the giver.
using ByScope = std::array<ClockRef, 3>;

// Which events of other threads one thread knows, as vector clocks, in three strengths ("Strengths
// of knowing" in MODEL.md). ordered: the events that happen before what the thread does next, which
// needs a release and an acquire. caused: needs neither: events that came before a store whose
// value the thread has loaded. packets: events that happen before the thread's next accesses to
// packets only: see fence_packets() in MODEL.md.
struct Knowledge {
    Agent agent;
    uint32_t counter = 1;  // number of this thread's next event
    uint32_t call = 0;     // index in Calls of the call that the thread makes
    uint64_t launch = 0;   // number of its launch
    ClockRef ordered;
    ClockRef caused;
    // Events that `caused` will contain too, and what their threads knew. To save time they are
    // joined only before `caused` is used or handed on, by settle_hearsay().
    std::vector<std::pair<Event, ClockRef>> hearsay;
    ByScope released;    // what this thread knew at its last releasing fences; its stores carry it
    ByScope to_acquire;  // what its relaxed loads have got, for its next acquiring fence
    ClockRef packets;
    ClockRef packets_released;    // as `released`, for packets that the thread stores
    ClockRef packets_to_acquire;  // as `to_acquire`, from packets that the thread has loaded

    // Returns the thread's next event.
    Event now() const { return {agent, counter}; }
    // Adds to `hearsay` the event of a store that the thread has loaded, and what its writer knew.
    void hear(Event event, const ClockRef& caused);
    void settle_hearsay();
    // snapshot() returns what a release by this thread would hand on now; packets_snapshot(), what
    // it would hand on by packets.
    ClockRef snapshot() const;
    ClockRef packets_snapshot() const;
};

// Sets `released` to `known` for all scopes up to `scope`.
void hand_on(ByScope& released, Scope scope, const ClockRef& known);

// A thread's first load that has returned a store, or halves of it.
struct Sight {
    Event reader = {};   // the load
    uint8_t halves = 3;  // which halves it has loaded, a bit each
};

// A store that loads may return. It "carries" what a thread that loads it may learn.
struct Record {
    uint64_t value = 0;  // value of all 8 bytes after this store
    // The store itself. Counter 0: a rank's program has stored, or this is the initial value.
    Event writer = {};
    uint32_t index = 0;              // number of the store among those to its granule
    ByScope released = {};           // what the store carries for `ordered`; null if nothing
    ClockRef packets_released = {};  // what a packet of system scope carries for `packets`
    ClockRef caused = {};            // what the store carries for `caused`
    uint32_t call = 0;
    uint8_t written = 3;  // which halves of 4 bytes it wrote, a bit each
    uint8_t halves = 3;   // for which of these halves a load may still return it
    Scope scope = Scope::kSystem;
    bool is_release = false;  // the store releases, or follows a release of this word by the same
                              // thread
    bool is_update = false;   // the store is part of a read-modify-write
    bool is_packet = false;
    bool is_plain = false;
    bool is_system_packet() const { return is_packet && scope == Scope::kSystem; }
    uint8_t skips = 0;  // how many loads have passed it over and returned an older store
    uint64_t site = 0;
    uint64_t step = 0;
    // The first load of each thread. A thread that knows of one must see no older store.
    std::vector<Sight> sights = {};
};

// An agent's last load of some halves of a granule.
struct Mark {
    // kPolled: the load is part of a poll that is not over. kTaken: the thread went on with the
    // loaded value. kRejected: the thread did not go on, and polled again.
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

// The last accesses of one kind to the same bytes of a granule, by the threads of one block.
struct Access {
    Event event = {};  // the last access of all
    uint32_t call = 0;
    uint8_t bytes = 0;      // which bytes of the granule, a bit each
    bool is_async = false;  // made by asynchronous copies
    enum Kind : uint8_t { kRead, kWrite, kLoad } kind = kRead;
    uint32_t last = 0;  // the greatest of `counters`
    uint64_t site = 0;
    uint64_t step = 0;
    // By thread, the counter of its last access, or 0. Empty while only one thread has made
    // accesses, of which `event` is the last.
    std::vector<uint32_t> counters = {};

    void add(Event next);
    // Tells whether add(next) would change nothing.
    bool is_last_of(Event next) const {
        return next == event ||
               (next.agent.thread < counters.size() && counters[next.agent.thread] == next.counter);
    }
};

// 8 aligned bytes, and what is known of accesses to them. Each half of 4 bytes has its own history
// of stores; a store of all 8 bytes is in both.
struct Granule {
    uint64_t address = 0;
    uint64_t launch = 0;       // number of the launch that has accessed it last
    uint32_t num_records = 0;  // number of Records so far
    uint32_t num_stores = 0;   // number of stores that could have ended a poll
    std::vector<Record> records;
    std::vector<Mark> marks;
    std::vector<Access> accesses;                // plain accesses
    std::unique_ptr<std::vector<Access>> looks;  // loads that returned no store of a thread
    std::vector<uint32_t> waiters;               // Warp::index of warps to wake after a store
    Event plain_writers[2];                      // the last plain store to each half
    uint8_t plainly_written = 0;                 // halves with a plain store not yet in `records`

    // Returns the position in `records` of the last store to any of these halves.
    size_t newest(uint8_t halves) const;
    // Returns the record with this index, or null if it is no longer remembered, so that no load
    // can return it.
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

// A granule that a thread has loaded in a poll, and the granule's num_stores at that time.
struct Look {
    Granule* granule;
    uint32_t num_stores;
};

// How often loads return old values in a run. The seed chooses this.
struct Weakness {
    uint32_t old_per_256 = 0;  // how many of 256 stores that a load need not see it passes over
    uint8_t max_skips = 0;     // after so many loads have passed over a store, all must see it
    // Which stores loads may pass over: all; only packets; all but packets; those of `rank`.
    enum Target : uint8_t { kAll, kPackets, kOthers, kOneRank } target = kAll;
    int32_t rank = 0;
};

class Memory {
  public:
    // What the ranks' programs on the host know: all that their ended launches did. When a program
    // itself writes to a window, a reader of that write learns all of this.
    ClockRef hosts;

    Memory(Slots& slots, Calls& calls, Reporter& reporter, const uint64_t& step)
        : slots_(slots), calls_(calls), reporter_(reporter), step_(step) {}

    // Forgets all accesses, and begins a run. Decisions follow from `tape`, or from the seed if it
    // is null. checks: see KcclSimSettings.
    void restart(const Weakness& weakness, uint64_t seed, Tape* tape, bool checks);

    // A load or store of a word through mem.cuh.
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
        uint32_t age;  // how many stores are newer than the one returned
        Event writer;  // the store that was returned, for the lower half
    };
    Seen load(Knowledge& me, const Access32Or64& access);
    Granule* store(Knowledge& me, const Access32Or64& access, uint64_t value);
    // update() is an atomic read-modify-write of 4 bytes, which reads the newest value. kClaim: a
    // compare-and-swap from 0 to `value`, which stores nothing if the word is not 0. kAdd: adds
    // `value`.
    enum class Update { kClaim, kAdd };
    struct Updated {
        Granule* granule;
        uint32_t before;
        uint32_t after;
        bool is_stored;
    };
    Updated update(Knowledge& me, const Access32Or64& access, Update what, uint32_t value);
    void fence(Knowledge& me, Order order, Scope scope);
    // fence_packets() makes a fence of packets (MODEL.md); acquire_packets() and release_packets(),
    // only its acquiring or its releasing half.
    static void fence_packets(Knowledge& me);
    static void acquire_packets(Knowledge& me);
    static void release_packets(Knowledge& me);

    // Checks and records a plain access, which the kernel makes itself.
    void plain(Knowledge& me, uint64_t address, uint64_t num_bytes, bool is_write, uint64_t site) {
        plain_range(me, address, num_bytes, is_write, false, nullptr, site);
    }
    // Checks and records an access of an asynchronous copy. copy: what the copy knows, as an agent
    // of its own. fenced: what came before a fence_copies() when it was started (Fiber::fenced).
    void async(Knowledge& copy, const ClockRef& fenced, uint64_t address, uint64_t num_bytes,
               bool is_write, uint64_t site) {
        plain_range(copy, address, num_bytes, is_write, true, &fenced, site);
    }

    // Tells whether all plain writes to these bytes that threads of its block have made before a
    // call happen before what this thread does next. If not, reports a data race at `site`. begun:
    // for each thread of the block the number of its last event before the call, or 0 if it does
    // not make the call.
    bool knows_writes(const Knowledge& me, uint64_t address, uint64_t num_bytes,
                      const std::vector<uint32_t>& begun, uint64_t site);

    // Called when a thread goes on with the values of its last loads (is_taken), or has polled in
    // vain. These loads are polled[first] and those behind it.
    void settle(Knowledge& me, const std::vector<Look>& polled, size_t first, bool is_taken);

    Granule& granule(const Knowledge& me, uint64_t address);
    void forget(uint64_t address, uint64_t num_bytes);

    void add_window(int rank, uint64_t address, uint64_t num_bytes);
    void remove_window(uint64_t address);
    // Returns the bytes from an address to the end of the window in which it lies, or 0 if it lies
    // in none.
    uint64_t window_room(uint64_t address) const;
    void begin_launch(uint64_t launch) { launches_.push_back(launch); }
    void end_launch(uint64_t launch) { std::erase(launches_, launch); }

    uint64_t old_loads = 0, loads = 0, passed_stores = 0;

  private:
    static constexpr uint64_t kGranulesPerPage = 64;
    static constexpr uint64_t kPageBytes = kGranulesPerPage * 8;
    // The granules of kPageBytes bytes of memory.
    struct Page {
        uint64_t number = 0;      // its address divided by kPageBytes
        uint32_t generation = 0;  // the run in which it was cleared last
        bool is_window = false;   // it overlaps a window
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
    // Returns the access that this thread makes now, for a finding.
    Deed doing(const Knowledge& me, KcclSimEventKind kind, uint64_t site) const {
        return {me.now(), me.call, site, step_, kind, true};
    }
    void check_plain(const Knowledge& me, Granule& granule, const Access32Or64& access,
                     KcclSimEventKind kind);
    void check_store(Knowledge& me, Granule& granule, const Access32Or64& access, uint64_t value);
    void check_writers(const Knowledge& me, Granule& granule, const Access32Or64& access,
                       const Record& before, uint8_t halves);
    // Adds an access of this thread to `accesses`, which are sorted by slot. Threads of a block
    // that make the same kind of access to the same bytes share an entry.
    void add(std::vector<Access>& accesses, const Knowledge& me, Access::Kind kind, uint8_t bytes,
             bool is_async, uint64_t site);
    // Tells whether `access` has an event of another thread than `me` that `clock` does not know.
    // Stores that event in *which.
    static bool is_unordered(const Access& access, const ClockRef& clock, Agent me, Event* which);
    void check_taken(Granule& granule, const Mark& mark);
    // If plain stores of kernels, or a rank's program, have changed the word in real memory, adds
    // what they wrote to the records.
    void refresh(Granule& granule) {
        // The load is atomic, because another OS thread, which runs a rank's program, may write the
        // word at the same time.
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
    // Tells whether the record's store happens before this access of the thread: by `ordered`, or,
    // if both are packets of system scope, by `packets`.
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
    uint32_t generation_ = 1;  // number of the run
    static constexpr uint64_t kRecentPages = 1024;

    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;  // keyed by Page::number
    // A cache of pages_, indexed by Page::number modulo its length.
    Page* recent_[kRecentPages] = {};
    std::vector<Window> windows_;
    std::vector<uint64_t> launches_;  // numbers of launches that run, or whose dependents do
    // What kSeqCst fences hand on to later ones: for each block, for each rank and for the system.
    std::map<std::pair<Scope, uint32_t>, ClockRef> sequential_;
    // The last store that a load has passed over, to count passed_stores (KcclSimStats).
    Event passed_over_;
};

}  // namespace kccl::sim
