// The watchdog: a timer on the CPU time of the OS thread that moves a machine sends it a signal.
// The signal's handler may leave a kernel's code for good, because a kernel holds no locks or
// memory that must be given back.
#include "watchdog.h"

#include <errno.h>
#include <link.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <memory>

#include "machine.h"

namespace kccl::sim {
namespace {

// SIGURG is ignored where nobody handles it, so a signal that comes late does no harm.
constexpr int kSignal = SIGURG;
constexpr uint64_t kAltStackBytes = 65536;

struct sigaction before;

// The timer of one OS thread. It is made when the thread first moves a machine.
struct Timer {
    Machine* machine = nullptr;  // the machine that the thread moves
    long id = -1;
    pid_t made_by = 0;  // the process that made the timer: a fork inherits this object, but not the
                        // timer
    // The stack on which the handler runs, or null if the OS thread had such a stack already.
    std::unique_ptr<uint8_t[]> stack;

    bool make();
    void arm(uint64_t period_ns) const;
    ~Timer();
};
thread_local Timer timer;

auto& code_address(ucontext_t& at) {
#if defined(__x86_64__)
    return at.uc_mcontext.gregs[REG_RIP];
#else
    return at.uc_mcontext.pc;
#endif
}

[[noreturn]] void leave() {
    running->leave_kernel();
    __builtin_unreachable();
}

// Changes the interrupted registers so that the thread calls leave() when the handler returns, on
// the stack of the code that was interrupted.
void call_leave(ucontext_t& at) {
#if defined(__x86_64__)
    constexpr greg_t kRedZoneBytes = 128;
    greg_t& stack = at.uc_mcontext.gregs[REG_RSP];
    stack = (stack - kRedZoneBytes) / 16 * 16 - 8;
    code_address(at) = reinterpret_cast<greg_t>(leave);
#else
    at.uc_mcontext.sp = at.uc_mcontext.sp / 16 * 16;
    code_address(at) = reinterpret_cast<uint64_t>(leave);
#endif
}

void on_tick(int number, siginfo_t* info, void* context) {
    if (info->si_code != SI_TIMER || info->si_value.sival_ptr == nullptr) {
        if ((before.sa_flags & SA_SIGINFO) != 0) {
            before.sa_sigaction(number, info, context);
        } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
            before.sa_handler(number);
        }
        return;
    }
    const int error = errno;
    Machine* const machine = static_cast<Timer*>(info->si_value.sival_ptr)->machine;
    auto& at = *static_cast<ucontext_t*>(context);
    if (machine != nullptr && machine->tick(static_cast<uint64_t>(code_address(at))))
        call_leave(at);
    errno = error;
}

bool handle_signal() {
    struct sigaction action = {};
    action.sa_sigaction = on_tick;
    // SA_ONSTACK: the handler runs on a stack of its own, because a fiber's stack is small.
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    return sigaction(kSignal, &action, &before) == 0;
}

bool Timer::make() {
    static const bool is_handled = handle_signal();
    if (!is_handled) return false;
    if (id >= 0 && made_by == getpid()) return true;
    id = -1;
    stack_t known = {};
    sigaltstack(nullptr, &known);
    if ((known.ss_flags & SS_DISABLE) != 0) {
        stack = std::make_unique<uint8_t[]>(kAltStackBytes);
        const stack_t mine = {.ss_sp = stack.get(), .ss_flags = 0, .ss_size = kAltStackBytes};
        if (sigaltstack(&mine, nullptr) != 0) return false;
    }
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kSignal;
    event.sigev_value.sival_ptr = this;
    event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
    // The system call is made directly, because older C libraries have timer_create() in librt.
    int made = -1;
    if (syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &made) != 0) return false;
    id = made;
    made_by = getpid();
    return true;
}

void Timer::arm(uint64_t period_ns) const {
    const timespec period = {static_cast<time_t>(period_ns / 1'000'000'000),
                             static_cast<long>(period_ns % 1'000'000'000)};
    const itimerspec times = {period, period};
    syscall(SYS_timer_settime, id, 0, &times, nullptr);
}

Timer::~Timer() {
    if (id >= 0 && made_by == getpid()) syscall(SYS_timer_delete, id);
    if (!stack) return;
    const stack_t none = {.ss_sp = nullptr, .ss_flags = SS_DISABLE, .ss_size = 0};
    sigaltstack(&none, nullptr);
}

}  // namespace

Watch::Watch(Machine& machine, uint64_t period_ns) {
    if (!timer.make()) return;
    timer.machine = &machine;
    timer.arm(period_ns);
}

Watch::~Watch() {
    if (timer.id < 0) return;
    timer.arm(0);
    timer.machine = nullptr;
}

CodeRange code_around(const void* address) {
    struct Search {
        uint64_t address;
        CodeRange found;
    } search = {reinterpret_cast<uint64_t>(address), {}};
    const auto look = [](dl_phdr_info* info, size_t, void* data) {
        auto& mine = *static_cast<Search*>(data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const ElfW(Phdr) & part = info->dlpi_phdr[i];
            const uint64_t begin = info->dlpi_addr + part.p_vaddr;
            if (part.p_type != PT_LOAD || mine.address - begin >= part.p_memsz) continue;
            mine.found = {begin, begin + part.p_memsz};
            return 1;
        }
        return 0;
    };
    dl_iterate_phdr(look, &search);
    return search.found;
}

// ---- What the machine does at a tick ------------------------------------------------------------

// Runs in the signal's handler. code: the address that was interrupted. Returns true if the kernel
// must be left at this place.
bool Machine::tick(uint64_t code) {
    const uint64_t moved = steps + switches;
    const bool has_moved = moved != moved_at_tick_;
    moved_at_tick_ = moved;
    idle_ticks_ = has_moved ? 0 : idle_ticks_ + 1;
    if (has_moved) {
        is_late_ = false;
        num_sampled_ = 0;
    }
    if (is_interrupted_.load(std::memory_order_relaxed)) {
        // So the next step ends the run.
        endless_at_ = 0;
        is_late_ = true;
    }
    const bool has_limit = settings.hang_ns != 0;
    if (has_limit && idle_ticks_ * watch_period_ns_ >= settings.hang_ns) is_late_ = true;
    if (!is_late_ || has_moved || current_ == nullptr) return false;
    // Only the kernel's own code is left. A thread that is in the machine's code reports itself
    // there (end_if_late()), with its line.
    if (!current_->block->grid->code.has(code)) return false;
    sampled_[num_sampled_++] = code;
    return num_sampled_ == kKcclSimNumNamed;
}

// Called in the running thread, which makes no step any more, after the handler has interrupted it.
// Reports the thread, and leaves it for good.
void Machine::leave_kernel() {
    Fiber& mine = *current_;
    // Sites are return addresses, whose line is looked up one byte before. So 1 is added.
    mine.site = sampled_[0] + 1;
    mine.address = 0;
    report_late();
    switch_away();
}

void Machine::report_late() {
    is_late_ = false;
    report_endless();
    KcclSimFinding& finding = findings.back();
    if (finding.kind != kKcclSimEndless) return;
    finding.is_hung = 1;
    // All addresses at which ticks met the thread are reported, because one of them may be in code
    // that the compiler calls, which tells the user nothing.
    for (uint32_t i = 0; i < num_sampled_; ++i) {
        finding.waiting[i] = finding.place;
        finding.waiting[i].site = sampled_[i] + 1;
    }
    finding.num_named = num_sampled_;
}

void Machine::interrupt() {
    is_interrupted_.store(true, std::memory_order_relaxed);
    changed_.notify_all();
}

}  // namespace kccl::sim
