// Vector clocks: they say which events of other threads a simulated thread knows.
//
// Every thread counts its own events. A thread's clock has a number for each other thread: it knows
// all events of the other thread up to that number. There may be a quarter of a million threads. So
// a clock has one number for each whole block, which a block barrier sets. It has a number for each
// thread of a block only where it knows more of some of them. Thousands of stores may keep the same
// clock, so a clock that is shared does not change: edit() copies it first.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace kccl::sim {

// A simulated thread. slot: the number of its block in the machine (see Slots in types.h), or of a
// block's asynchronous copies. thread: its number in the block, or the number of the copy barrier.
struct Agent {
    uint32_t slot = 0;
    uint32_t thread = 0;

    bool operator==(const Agent&) const = default;
};

// One event of an agent, as the agent counts its events. Counter 0 is no event: it stands for the
// time before the run, which every thread knows.
struct Event {
    Agent agent;
    uint32_t counter = 0;

    bool operator==(const Event&) const = default;
};

// A pointer that counts references. Only one thread uses a machine, so it needs no atomics.
template <class T>
class Ref {
  public:
    Ref() = default;
    explicit Ref(T* object) : object_(object) { hold(); }
    Ref(const Ref& other) : object_(other.object_) { hold(); }
    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() {
        if (object_ != nullptr && --object_->refs == 0) delete object_;
    }

    T* get() const { return object_; }
    T* operator->() const { return object_; }
    T& operator*() const { return *object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    void hold() {
        if (object_ != nullptr) ++object_->refs;
    }
    T* object_ = nullptr;
};

class Clock {
  public:
    uint32_t refs = 0;  // for Ref

    // Returns the counter of the last event of the agent that this clock knows, or 0 if it knows
    // none.
    uint32_t of(Agent agent) const {
        const uint32_t all = agent.slot < all_.size() ? all_[agent.slot] : 0;
        const Part* const part = each_.empty() ? nullptr : find(agent.slot);
        if (part == nullptr || agent.thread >= part->each->counters.size()) return all;
        return std::max(part->each->counters[agent.thread], all);
    }
    bool knows(Event event) const { return event.counter <= of(event.agent); }
    // Returns true if the clock knows all threads of the slot up to this counter.
    bool knows_all(uint32_t slot, uint32_t counter) const {
        return slot < all_.size() && counter <= all_[slot];
    }

    // These functions change the clock, which must not be shared: see edit(). add() adds one event
    // and all before it of its agent; add_block(), the events up to `counter` of all threads of a
    // slot; join(), all that another clock knows.
    void add(Event event);
    void add_block(uint32_t slot, uint32_t counter);
    void join(const Clock& other);

  private:
    struct Counters {
        uint32_t refs = 0;
        std::vector<uint32_t> counters;
    };
    // The numbers of the threads of one slot.
    struct Part {
        uint32_t slot;
        Ref<Counters> each;
    };

    void make_room(size_t num_slots);
    // find() returns the part of a slot, or null. lower_bound() returns where the part is in each_,
    // or where it would be. edit_counters() returns a part's counters for changes, at least `size`
    // of them, after a copy if other clocks share them.
    const Part* find(uint32_t slot) const;
    std::vector<Part>::iterator lower_bound(uint32_t slot);
    static std::vector<uint32_t>& edit_counters(Part& part, size_t size);

    std::vector<uint32_t> all_;  // by slot: up to which event all of its threads are known
    std::vector<Part> each_;     // sorted by slot: the slots where more is known of some threads
};

using ClockRef = Ref<Clock>;

// Returns the clock to which `ref` points, for changes. If the clock is shared, first makes `ref`
// point to a copy; if `ref` is null, to a new clock.
Clock& edit(ClockRef& ref);

// Adds to `into` all that `other` knows. A null clock knows nothing.
void join(ClockRef& into, const ClockRef& other);

// A clock that many threads join into theirs. Threads of a warp mostly have the same clock before
// the join, and so equal clocks after it. So the first thread's result is kept, and the others get
// that clock without a comparison of numbers.
class JoinedOften {
  public:
    JoinedOften() = default;
    explicit JoinedOften(ClockRef clock) : clock_(std::move(clock)) {}
    // Does what join(into, clock) does.
    void join_to(ClockRef& into);

  private:
    // A thread's clock before and after a join. Because both are held here, they count as shared,
    // so edit() copies them and does not change them.
    struct Case {
        ClockRef before;
        ClockRef after;
    };

    ClockRef clock_;
    // The last joins, indexed by a hash of the address of `before`. There are several entries,
    // because several warps may make their joins in turns.
    std::array<Case, 16> known_;
};

inline bool knows(const ClockRef& clock, Event event) {
    return event.counter == 0 || (clock && clock->knows(event));
}

}  // namespace kccl::sim
