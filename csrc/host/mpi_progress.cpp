// Lets MPI make progress while a rank waits in a call of KCCL.
//
// MPI has no thread of its own, so a long message leaves its sender only while the sender is within
// some call of MPI. Without this file two ranks might deadlock: rank 0 has begun to send rank 1 a
// message by MPI, and now waits for rank 1 in a collective of KCCL. Rank 1 enters the collective
// only after it has received the message.
#include "mpi_progress.h"

#include <atomic>

#include "mpi.h"

namespace kccl::host {
namespace {

// The functions and the communicator of MPI that the hook uses. Written before the hook is set, and
// afterwards only read, so threads need no lock.
KcclNodes with = {};

template <class Handle>
void go_on() {
    Mpi<Handle>::progress(with);
}

}  // namespace
}  // namespace kccl::host

extern "C" void kccl_host_let_mpi_go_on(const KcclNodes* mpi) {
    using namespace kccl::host;
    const std::atomic_ref<void (*)()> hook(mpi_hook);
    if (mpi == nullptr) {
        hook.store(nullptr, std::memory_order_relaxed);
        return;
    }
    with = *mpi;
    const bool is_int = mpi->handle_bytes == sizeof(int);
    hook.store(is_int ? go_on<int> : go_on<void*>, std::memory_order_release);
}
