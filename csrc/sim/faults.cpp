#include "faults.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "answers.h"
#include "machine.h"

namespace kccl::sim {
namespace {

constexpr size_t kStackBytes = 65536;

// The signal handlers of the process before this Faults was made; on_signal() hands signals on to
// them. A global variable is enough, because only one Faults lives at a time.
struct sigaction before[Faults::kCount];
pthread_t mover;  // the OS thread that has made the Faults, and runs the kernels
// The stack on which the handler runs, because the kernel's own may have no room left.
alignas(64) uint8_t handler_stack[kStackBytes];

void on_signal(int signal, siginfo_t* info, void* context) {
    const bool is_raised_by_cpu = info->si_code > 0;
    if (is_raised_by_cpu && running != nullptr && pthread_equal(pthread_self(), mover) != 0 &&
        running->has_thread()) {
        sigset_t these;
        sigemptyset(&these);
        sigaddset(&these, signal);
        pthread_sigmask(SIG_UNBLOCK, &these, nullptr);
        running->fault_by_signal(signal, reinterpret_cast<uint64_t>(info->si_addr),
                                 interrupted_at(context));
    }
    // The signal does not come from a kernel, so the process's earlier handler is installed again.
    // When this handler returns, the faulting instruction runs again and the earlier handler is
    // called. A signal that the CPU did not raise is raised again.
    for (size_t i = 0; i < Faults::kCount; ++i) {
        if (Faults::kSignals[i] == signal) sigaction(signal, &before[i], nullptr);
    }
    if (!is_raised_by_cpu) raise(signal);
}

}  // namespace

Faults::Faults() {
    mover = pthread_self();
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = kStackBytes;
    sigaltstack(&stack, &stack_before_);
    struct sigaction mine = {};
    mine.sa_sigaction = on_signal;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&mine.sa_mask);
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &mine, &before[i]);
}

Faults::~Faults() {
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &before[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
}

void Machine::fault(KcclSimFindingKind kind, uint64_t address, uint64_t site, const char* text) {
    Fiber& mine = *current_;
    mine.site = site;
    mine.address = address;
    report_here(kind);
    findings.back().text = text;
    switch_away();
    __builtin_unreachable();
}

void Machine::fault_by_signal(int signal, uint64_t address, uint64_t code) {
    Fiber& mine = *current_;
    Dl_info here;
    Dl_info kernel;
    // If the fault is in other code, such as a C library's, mine.site stays as it is: the line in
    // the kernel that called the engine last tells the user more.
    const bool is_in_kernel =
        dladdr(reinterpret_cast<void*>(code), &here) != 0 &&
        dladdr(reinterpret_cast<void*>(mine.block->grid->entry), &kernel) != 0 &&
        here.dli_fbase == kernel.dli_fbase;
    // A site is a return address, which lies behind its instruction, so 1 is added.
    if (is_in_kernel) mine.site = code + 1;
    mine.address = address;
    if (signal == SIGSEGV || signal == SIGBUS) {
        if (mine.self.stack - address <= stacks_.guard_bytes()) {
            fault(kKcclSimStackOverflow, address, mine.site, nullptr);
        }
        // The signal does not tell the size of the access, so 0 bytes are reported.
        report_edge(address, 0, kKcclSimRead);
        switch_away();
    }
    fault(kKcclSimTrap, address, mine.site, signal == SIGFPE ? "SIGFPE" : "SIGILL");
}

void* move_bytes(void* to, const void* from, uint64_t num_bytes) {
    return memmove(to, from, num_bytes);
}

void* fill_bytes(void* to, int value, uint64_t num_bytes) { return memset(to, value, num_bytes); }

void stop_overrun(const void* site) {
    running->fault(kKcclSimOverrunLocal, 0, reinterpret_cast<uint64_t>(site), nullptr);
}

void stop_assertion(const char* text, const void* site) {
    const uint64_t from = site != nullptr ? reinterpret_cast<uint64_t>(site)
                                          : reinterpret_cast<uint64_t>(__builtin_return_address(0));
    running->fault(kKcclSimAssertion, 0, from, text);
}

}  // namespace kccl::sim
