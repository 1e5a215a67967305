// Fibers: threads of control inside one OS thread, with a stack each. A switch takes some ten
// nanoseconds.
#pragma once

#include <setjmp.h>
#include <stdint.h>

#include <vector>

namespace kccl::sim {

// The point where a fiber continues; saved when it switches away.
struct Context {
    jmp_buf registers;
};

// Continues at `to`; returns when somebody switches back to `from`.
void switch_context(Context& from, Context& to);

// Makes `context` a new fiber that calls body(argument), which never returns. here: a context that
// is used until make_context() returns.
void make_context(Context& context, Context& here, uint8_t* stack, uint64_t stack_bytes,
                  void (*body)(void*), void* argument);

// Returns the code address at which a signal has come. `context`: the argument of its handler.
uint64_t interrupted_at(const void* context);

// Stacks of one size. They are kept until the end, because the next run needs them again.
class Stacks {
  public:
    static constexpr uint64_t kBytes = 32768;

    Stacks();
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    // Returns the lowest address of stack `index`; nullptr if there is no memory.
    uint8_t* at(uint64_t index);
    // The bytes below a stack that nobody may access, because the stack would grow into them.
    uint64_t guard_bytes() const { return guard_bytes_; }
    // Tells whether the address lies in one of the stacks, or in a guard.
    bool holds(uint64_t address) const;

  private:
    static constexpr uint64_t kPerSlab = 1024;
    // A process may have 65,530 mappings, and a guard adds two. Stacks from this index on have no
    // guard.
    static constexpr uint64_t kMostGuards = 16384;
    // The bytes of a guard: a page below a stack that nobody may access.
    const uint64_t guard_bytes_;
    // The bytes from one stack to the next: whole pages.
    const uint64_t stride_;
    std::vector<uint8_t*> slabs_;
    uint64_t num_guards_ = 0;
};

}  // namespace kccl::sim
