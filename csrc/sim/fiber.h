// Fibers: threads of control within one OS thread, each with its own stack. A switch from one to
// another takes some ten nanoseconds.
#pragma once

#include <setjmp.h>
#include <stdint.h>

#include <vector>

namespace kccl::sim {

// The registers of a fiber that is switched away, with which it continues.
struct Context {
    jmp_buf registers;
};

// Saves the running fiber in `from` and continues the fiber saved in `to`. Returns when a fiber
// switches back to `from`.
void switch_context(Context& from, Context& to);

// Makes `context` a new fiber with this stack. The first switch to it calls body(argument), which
// must never return. here: room for the caller's own context while make_context() runs.
void make_context(Context& context, Context& here, uint8_t* stack, uint64_t stack_bytes,
                  void (*body)(void*), void* argument);

// Returns the code address that a signal has interrupted. context: the third argument of the
// signal's handler.
uint64_t interrupted_at(const void* context);

// Stacks for fibers, all of one size. They are freed with this object only, because the next run
// uses them again.
class Stacks {
  public:
    static constexpr uint64_t kBytes = 32768;

    Stacks();
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    // Returns the lowest address of stack `index`, which is made if it does not exist; null if
    // there is no memory.
    uint8_t* at(uint64_t index);
    // Returns the bytes of a stack's guard: memory below the stack that nobody may access, so that
    // a stack that grows too far faults.
    uint64_t guard_bytes() const { return guard_bytes_; }
    // Tells whether an address lies in one of the stacks or guards.
    bool holds(uint64_t address) const;

  private:
    static constexpr uint64_t kPerSlab = 1024;
    // Stacks from this index on have no guard, because each guard adds two memory mappings, and
    // Linux allows a process 65,530 of them.
    static constexpr uint64_t kMostGuards = 16384;
    // The bytes of a guard: one page.
    const uint64_t guard_bytes_;
    // The bytes from one stack to the next, guard included: whole pages.
    const uint64_t stride_;
    std::vector<uint8_t*> slabs_;
    uint64_t num_guards_ = 0;
};

}  // namespace kccl::sim
