// Turns faults in simulated kernels, such as SIGSEGV, into findings, so that the Python process
// does not end.
#pragma once

#include <signal.h>
#include <stddef.h>

#include <memory>

namespace kccl::sim {

// While such an object lives, signals that the CPU raises in kernels that this OS thread runs
// become findings. All other signals go to the handlers that were there before. Only one object may
// live at a time.
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
