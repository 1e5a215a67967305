// Turns signals that the CPU raises in a kernel into findings, so that Python goes on.
#pragma once

#include <signal.h>
#include <stddef.h>

#include <memory>

namespace kccl::sim {

// While such an object lives, faults in the kernels that this OS thread moves are findings. All
// other faults go to the handlers that were there before. Only one object may live at a time.
class Faults {
  public:
    Faults();
    Faults(const Faults&) = delete;
    Faults& operator=(const Faults&) = delete;
    ~Faults();

    static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    static constexpr size_t kCount = sizeof(kSignals) / sizeof(kSignals[0]);

  private:
    stack_t stack_before_;
};

}  // namespace kccl::sim
