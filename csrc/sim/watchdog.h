// Looks at the OS thread that moves a machine every tenth of a second of its CPU time. So a kernel
// that never comes back to the machine ends, and Ctrl-C ends any kernel.
#pragma once

#include <stdint.h>

namespace kccl::sim {

class Machine;

// Watches the calling OS thread while it lives. Its ticks call Machine::tick().
class Watch {
  public:
    Watch(Machine& machine, uint64_t period_ns);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
};

// Returns the executable memory around an address of code: [begin, end).
struct CodeRange {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool has(uint64_t address) const { return address - begin < end - begin; }
};
CodeRange code_around(const void* address);

}  // namespace kccl::sim
