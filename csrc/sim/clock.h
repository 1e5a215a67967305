// Vector clocks. They record what a thread of the machine knows of the others.
//
// Every thread counts its own events. A clock says for each other thread up to which event its
// owner knows that thread. There may be a quarter of a million threads. So a clock has one number
// for each whole block, which a block barrier sets, and one for each thread of a block only where
// needed. A clock that is shared does not change, because thousands of stores keep the same one.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace kccl::sim {

// A thread of a block. A slot is the number of a block (or of a rank's host) in the machine.
struct Agent {
    uint32_t slot = 0;
    uint32_t thread = 0;

    bool operator==(const Agent&) const = default;
};

// One event of an agent. Counter 0 stands for the time before everything, which all know.
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
    uint32_t refs = 0;

    // The last event of the agent that this clock knows.
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

    // These change the clock, which must not be shared: see edit().
    void add(Event event);
    void add_block(uint32_t slot, uint32_t counter);
    void join(const Clock& other);

  private:
    struct Counters {
        uint32_t refs = 0;
        std::vector<uint32_t> counters;
    };
    struct Part {
        uint32_t slot;
        Ref<Counters> each;
    };

    void make_room(size_t num_slots);
    // The part of the slot, or null. lower_bound: the part's place, present or not.
    const Part* find(uint32_t slot) const;
    std::vector<Part>::iterator lower_bound(uint32_t slot);
    static std::vector<uint32_t>& edit_counters(Part& part, size_t size);

    std::vector<uint32_t> all_;  // by slot: what is known of all its threads
    std::vector<Part> each_;     // by slot: where more is known of some threads
};

using ClockRef = Ref<Clock>;

// Returns the clock behind `ref` for changes: a copy if others hold it too.
Clock& edit(ClockRef& ref);

// Adds the knowledge of `other` to `into`.
void join(ClockRef& into, const ClockRef& other);

// A clock that many threads join into theirs. Threads of a warp mostly know the same before the
// join, and so the same after it. The others then get the clock that the first one got, and no
// numbers are compared.
class JoinedOften {
  public:
    JoinedOften() = default;
    explicit JoinedOften(ClockRef clock) : clock_(std::move(clock)) {}
    // As join(into, clock).
    void join_to(ClockRef& into);

  private:
    // Knowledge before and after a join. Because both are held here, edit() copies them and does
    // not change them.
    struct Case {
        ClockRef before;
        ClockRef after;
    };

    ClockRef clock_;
    // Indexed by the address of `before`. There are several, because warps take turns.
    std::array<Case, 16> known_;
};

inline bool knows(const ClockRef& clock, Event event) {
    return event.counter == 0 || (clock && clock->knows(event));
}

}  // namespace kccl::sim
