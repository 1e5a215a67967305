// Interrupts the OS thread that moves a machine after each tenth of a second of its CPU time, or
// earlier. So a kernel that never calls the machine again is ended, and Ctrl-C ends any kernel.
#pragma once

#include <stdint.h>

namespace kccl::sim {

class Machine;

// While such an object lives, the calling OS thread is interrupted after every period_ns of its CPU
// time, by a call of machine.tick() in a signal handler.
class Watch {
  public:
    Watch(Machine& machine, uint64_t period_ns);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
};

// code_around() returns the part of a library's memory, [begin, end), that contains an address of
// code.
struct CodeRange {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool has(uint64_t address) const { return address - begin < end - begin; }
};
CodeRange code_around(const void* address);

}  // namespace kccl::sim
