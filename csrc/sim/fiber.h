// Threads of control inside one OS thread: a stack each, switched in some ten nanoseconds.
#pragma once

#include <setjmp.h>
#include <stdint.h>

#include <vector>

namespace kccl::sim {

// Where a thread of control goes on; saved when it switches away.
struct Context {
    jmp_buf registers;
};

// Goes on at `to`; returns when somebody switches back to `from`.
void switch_context(Context& from, Context& to);

// Makes `context` a new thread of control that calls body(argument), which never returns.
// `here` is used while it is made.
void make_context(Context& context, Context& here, uint8_t* stack, uint64_t stack_bytes,
                  void (*body)(void*), void* argument);

// Stacks of one size, kept until the end, because the next schedule needs them again.
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
