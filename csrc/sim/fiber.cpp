// With _FORTIFY_SOURCE, glibc's longjmp refuses to jump to another stack.
#undef _FORTIFY_SOURCE
#include "fiber.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>

namespace kccl::sim {
namespace {

// The arguments of start(), in a global variable because makecontext() passes no pointers. start()
// copies them before make_context() returns, so the next call may overwrite them.
struct Beginning {
    void (*body)(void*);
    void* argument;
    Context* context;
    Context* here;
};
Beginning beginning;

void start() {
    const Beginning mine = beginning;
    if (_setjmp(mine.context->registers) == 0) _longjmp(mine.here->registers, 1);
    mine.body(mine.argument);
    abort();
}

}  // namespace

// Not inlined, so that the compiler keeps no values of the caller in registers across the switch.
__attribute__((noinline)) void switch_context(Context& from, Context& to) {
    if (_setjmp(from.registers) == 0) _longjmp(to.registers, 1);
}

// Starts a fiber by makecontext(), because setjmp() cannot start on a new stack. All later switches
// use setjmp() and longjmp(), because a switch by setcontext() costs a system call.
void make_context(Context& context, Context& here, uint8_t* stack, uint64_t stack_bytes,
                  void (*body)(void*), void* argument) {
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = stack;
    first.uc_stack.ss_size = stack_bytes;
    first.uc_link = nullptr;
    makecontext(&first, start, 0);
    beginning = {body, argument, &context, &here};
    if (_setjmp(here.registers) == 0) setcontext(&first);
}

uint64_t interrupted_at(const void* context) {
    const mcontext_t& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return static_cast<uint64_t>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return machine.pc;
#else
#error "which register has the code address?"
#endif
}

Stacks::Stacks()
    : guard_bytes_(static_cast<uint64_t>(sysconf(_SC_PAGESIZE))),
      stride_(guard_bytes_ + (kBytes + guard_bytes_ - 1) / guard_bytes_ * guard_bytes_) {}

Stacks::~Stacks() {
    for (uint8_t* slab : slabs_) munmap(slab, kPerSlab * stride_);
}

uint8_t* Stacks::at(uint64_t index) {
    while (index / kPerSlab >= slabs_.size()) {
        void* slab = mmap(nullptr, kPerSlab * stride_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) return nullptr;
        slabs_.push_back(static_cast<uint8_t*>(slab));
    }
    const auto begin = [this](uint64_t each) {
        return slabs_[each / kPerSlab] + each % kPerSlab * stride_;
    };
    for (; num_guards_ <= index && num_guards_ < kMostGuards; ++num_guards_) {
        if (mprotect(begin(num_guards_), guard_bytes_, PROT_NONE) != 0) return nullptr;
    }
    return begin(index) + guard_bytes_;
}

bool Stacks::holds(uint64_t address) const {
    return std::any_of(slabs_.begin(), slabs_.end(), [this, address](const uint8_t* slab) {
        return address - reinterpret_cast<uint64_t>(slab) < kPerSlab * stride_;
    });
}

}  // namespace kccl::sim
