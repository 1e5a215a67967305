// What a rank on a CPU does between two rounds of polls while it waits: it yields its core, lets
// Python and MPI make progress, and checks whether its peers' processes are alive.
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/uio.h>
#include <time.h>

#include <atomic>

#include "../include/kccl/targets/host_idle.h"
#include "chain.h"
#include "host.h"
#include "mpi_progress.h"

extern "C" {
#include "routes.inc"
}

namespace kccl::host {

uint32_t (*interpreter_hook)() = nullptr;
void (*team_hook)() = nullptr;
void (*mpi_hook)() = nullptr;

namespace {

// The time between two checks whether the peers' processes are alive. 2 ms is long enough that the
// checks cost nothing, and short enough that the user learns of a killed rank at once.
constexpr uint64_t kLookEveryNs = 2'000'000;

// After 1 us a waiting rank yields its core in every round of polls, because a peer may need the
// core. A yield to nobody costs half a microsecond.
constexpr uint64_t kYieldAfterNs = 1'000;

// After 20 us a waiting rank calls MPI in every round of polls, so that MPI makes progress. A call
// takes a fraction of a microsecond. Most waits are shorter than 20 us.
constexpr uint64_t kProgressAfterNs = 20'000;

// Tells whether the process to which a pidfd or a socket (is_socket) belongs has ended. A pidfd
// becomes readable when its process ends, even if nobody has waited for the process yet (a zombie).
// A socket also becomes readable when data comes, so its end is seen by POLLRDHUP. For a negative
// fd no process is watched, and the result is false.
bool is_gone(int fd, bool is_socket) {
    if (fd < 0) return false;
    const short event = is_socket ? POLLRDHUP : POLLIN;
    pollfd poll_fd = {fd, event, 0};
    return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & event) != 0;
}

}  // namespace
}  // namespace kccl::host

extern "C" {

uint64_t kccl_host_clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

int kccl_host_read_process(int pid, void* to, uint64_t from, uint64_t num_bytes) {
    auto* next = static_cast<uint8_t*>(to);
    while (num_bytes > 0) {
        const iovec here = {next, num_bytes};
        const iovec there = {reinterpret_cast<void*>(from), num_bytes};
        const ssize_t done = process_vm_readv(pid, &here, 1, &there, 1, 0);
        // process_vm_readv() may copy fewer bytes, for example if the peer ends meanwhile. The loop
        // then tries to copy the rest, and that call reports the error.
        if (done < 0) return errno;
        if (done == 0) return EFAULT;
        next += done;
        from += static_cast<uint64_t>(done);
        num_bytes -= static_cast<uint64_t>(done);
    }
    return 0;
}

int kccl_host_read_peer(uint64_t idle_context, int peer, void* to, uint64_t from,
                        uint64_t num_bytes) {
    const auto* context = reinterpret_cast<const KcclHostContext*>(idle_context);
    return kccl_host_read_process(context->pid[peer], to, from, num_bytes);
}

int kccl_host_note_read(uint64_t idle_context, int peer, int pid, int error) {
    auto* context = reinterpret_cast<KcclHostContext*>(idle_context);
    // ESRCH says that the peer's process has ended, which is no refusal. A rank that waits for the
    // peer finds the end in kccl_host_idle().
    if (error != 0 && error != ESRCH && context->refused == 0) {
        context->refused = static_cast<uint32_t>(error);
        context->refused_peer = peer;
        context->refused_pid = pid;
    }
    return error == 0;
}

int kccl_host_may_read_peer(uint64_t idle_context, int peer) {
    const auto* context = reinterpret_cast<KcclHostContext*>(idle_context);
    uint64_t word;
    const int error =
        kccl_host_read_peer(idle_context, peer, &word, context->probe[peer], sizeof(word));
    return kccl_host_note_read(idle_context, peer, context->pid[peer], error);
}

uint32_t kccl_host_idle(uint64_t idle_context, uint64_t waited_ns, uint32_t missing,
                        uint32_t* gone) {
    using namespace kccl::host;
    auto* context = reinterpret_cast<KcclHostContext*>(idle_context);
    if (context->holds_gil && interpreter_hook != nullptr && interpreter_hook() != 0) {
        return kKcclInterrupted;
    }
    if (context->shares_cores || waited_ns > kYieldAfterNs) sched_yield();
    if (waited_ns > kProgressAfterNs) {
        auto* const hook = std::atomic_ref<void (*)()>(mpi_hook).load(std::memory_order_acquire);
        if (hook != nullptr) hook();
    }
    const uint64_t now = kccl_host_clock_ns();
    // The time of the last check is read and written atomically: several threads of a rank may wait
    // at the same time, as the blocks of the engine on CPUs do.
    const std::atomic_ref<uint64_t> last_look_ns(context->last_look_ns);
    if (now - last_look_ns.load(std::memory_order_relaxed) < kLookEveryNs) return kKcclOk;
    last_look_ns.store(now, std::memory_order_relaxed);
    if (team_hook != nullptr) team_hook();
    for (int rank = 0; rank < kKcclMaxWorldSize; ++rank) {
        if ((missing >> rank & 1u) == 0) continue;
        if (is_gone(context->pidfd[rank], context->watches_sockets != 0)) *gone |= 1u << rank;
    }
    return kKcclOk;
}

}  // extern "C"
