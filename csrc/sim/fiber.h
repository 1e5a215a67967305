// Fibers: threads of control inside one OS thread, with a stack each. A switch takes some ten
// nanoseconds.
#pragma once

#include <setjmp.h>
#include <stdint.h>

#include <vector>

namespace kccl::sim {

// Where a fiber continues; saved when it switches away.
struct Context {
    jmp_buf registers;
};

// Continues at `to`; returns when somebody switches back to `from`.
void switch_context(Context& from, Context& to);

// Makes `context` a new fiber that calls body(argument), which never returns. `here` is used
// meanwhile.
void make_context(Context& context, Context& here, uint8_t* stack, uint64_t stack_bytes,
                  void (*body)(void*), void* argument);

// Stacks of one size. They are kept until the end, because the next run needs them again.
class Stacks {
  public:
    static constexpr uint64_t kBytes = 32768;

    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    // The lowest address of stack `index`; nullptr when there is no memory.
    uint8_t* at(uint64_t index);

  private:
    static constexpr uint64_t kPerSlab = 1024;
    std::vector<uint8_t*> slabs_;
};

}  // namespace kccl::sim
