// The host core's C interface (api.inc): finds the kernels for this CPU, calls them and times
// calls.
#include "../include/kccl/device_comm.h"
#include "../include/kccl/wait.cuh"
#include "host.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kccl::host {
namespace {

struct InstructionSet {
    const char* name;
    const KernelTable* kernels;
};

#if defined(__x86_64__)
// Bits of the CPU's register XCR0. If they are set, the operating system saves the YMM registers
// (AVX), or the ZMM registers (AVX-512), so programs may use these.
constexpr uint64_t kYmm = 0x06, kZmm = 0xe6;
__attribute__((target("xsave"))) uint64_t saved_registers() { return _xgetbv(0); }

// __builtin_cpu_supports is not used, because the clang of the ziglang wheel lacks its run-time
// part.
const InstructionSet* best_of_x86_64() {
    static constexpr InstructionSet kV3 = {"x86-64-v3", &kKernelsV3};
    static constexpr InstructionSet kV4 = {"x86-64-v4", &kKernelsV4};
    constexpr uint32_t kV3Leaf1 = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    constexpr uint32_t kV3Leaf7 = bit_AVX2 | bit_BMI2;
    constexpr uint32_t kV4Leaf7 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    uint32_t eax, leaf7, leaf1, edx, unused;
    if (!__get_cpuid(1, &eax, &unused, &leaf1, &edx) || (leaf1 & kV3Leaf1) != kV3Leaf1 ||
        !__get_cpuid_count(7, 0, &eax, &leaf7, &unused, &edx) || (leaf7 & kV3Leaf7) != kV3Leaf7) {
        return nullptr;
    }
    const uint64_t saved = saved_registers();
    if ((leaf7 & kV4Leaf7) == kV4Leaf7 && (saved & kZmm) == kZmm) return &kV4;
    return (saved & kYmm) == kYmm ? &kV3 : nullptr;
}
#endif

InstructionSet best_instruction_set() {
#if defined(__x86_64__)
    if (const InstructionSet* best = best_of_x86_64()) return *best;
#endif
    return {"baseline", &kKernelsBaseline};
}

const InstructionSet& instruction_set() {
    static const InstructionSet best = best_instruction_set();
    return best;
}

// How long compare_once() waits for the description of a peer's call (description.cuh). A peer
// writes it right after its packets, so it is late only if the peer is stopped in between, for
// example descheduled.
constexpr uint64_t kDescribesWithinNs = 1'000'000;

// Compares a call that has just been made with the peers' descriptions of the same call, and fails
// this rank if they differ. This rank has not entered its next call, so no peer can have
// overwritten its description yet.
void compare_once(KcclHostOp* op) {
    const DeviceComm& comm = op->call.comm;
    if (status_of(comm) != kKcclOk) return;
    op->is_new = 0;
    const int index = op->call.channel * comm.blocks_per_channel;
    const ChannelState& made = *channel_state(comm, index);
    const bool all_have_sent = made.credit_due == 0;
    const uint64_t began_ns = kccl_host_clock_ns();
    for (int peer = 0; all_have_sent && peer < comm.world_size; ++peer) {
        while (described(comm, peer, index, made.epoch).call == kUnknownCall &&
               kccl_host_clock_ns() - began_ns < kDescribesWithinNs) {
            mem::poll_pause();
        }
    }
    make_same_call(comm, {op->call.kernel, op->call.channel, made.epoch}, ~(1u << comm.rank));
}

}  // namespace

RowsReducer rows_reducer(uint32_t dtype, uint32_t op) {
    return instruction_set().kernels->rows[dtype][op];
}

}  // namespace kccl::host

extern "C" {

int kccl_host_layout(KcclLayout* filled, uint64_t world_size, const KcclSizes* sizes,
                     uint64_t page_bytes) {
    if (!kccl::fits_layout(*sizes)) return -1;
    *filled = kccl::layout(world_size, *sizes, page_bytes);
    return 0;
}

void kccl_host_sizes_for_kernels(KcclSizes* filled, uint32_t channels, uint64_t max_bytes,
                                 uint64_t exchange_bytes) {
    *filled = kccl::sizes_for_kernels(channels, max_bytes, exchange_bytes);
}

void kccl_host_make_comm(KcclDeviceComm* filled, int rank, int world_size, const KcclSizes* sizes,
                         const uint64_t* windows, const uint64_t* scratches, uint64_t state,
                         uint64_t channels, uint64_t page_bytes, uint32_t polls_per_check) {
    *filled = kccl::make_comm(rank, world_size, *sizes, {windows, scratches, state, channels},
                              page_bytes, polls_per_check);
}

const char* kccl_host_instruction_set(void) { return kccl::host::instruction_set().name; }

int kccl_host_bind(KcclHostOp* op) {
    KcclCall& call = op->call;
    if (call.kernel >= kKcclNumKernels || call.dtype >= kKcclNumDtypes || call.op >= kKcclNumOps ||
        call.comm.abi_version != kKcclAbiVersion) {
        return -1;
    }
    const kccl::host::KernelTable& table = *kccl::host::instruction_set().kernels;
    op->kernel = table.kernel[call.kernel][call.dtype][call.op];
    if (op->kernel == nullptr) return -1;
    const uint64_t units = table.units[call.kernel][call.dtype];
    if (units > 1) {
        call.count *= units;
        op->bytes_per_count /= units;
    }
    return 0;
}

uint32_t kccl_host_run(KcclHostOp* op) {
    op->kernel(&op->call);
    if (op->is_new != 0) [[unlikely]]
        kccl::host::compare_once(op);
    return kccl::status_of(op->call.comm);
}

uint32_t kccl_host_time(KcclHostOp* op, uint64_t iterations, double* us) {
    // A loop of short calls has no long wait, in which Ctrl-C would be noticed. So the loop itself
    // lets Python's signal handlers run this often.
    constexpr uint64_t kLookEveryNs = 20'000'000;
    uint64_t before = kccl_host_clock_ns();
    uint64_t looked = before;
    for (uint64_t i = 0; i < iterations; ++i) {
        const uint32_t status = kccl_host_run(op);
        if (status != kKcclOk) return status;
        const uint64_t after = kccl_host_clock_ns();
        us[i] = static_cast<double>(after - before) * 1e-3;
        before = after;
        if (after - looked < kLookEveryNs || kccl::host::interpreter_hook == nullptr) continue;
        looked = after;
        if (kccl::host::interpreter_hook() != 0) return kKcclInterrupted;
    }
    return kKcclOk;
}

void kccl_host_abort(const KcclDeviceComm* comm, const KcclRecord* record) {
    kccl::give_up(*comm, *record);
}

void kccl_host_leave(const KcclDeviceComm* comm) {
    // If this rank gave up, its abort word at the peers says so, and must not be overwritten: peers
    // that have not read the word yet would miss the failure.
    if (kccl::status_of(*comm) != kKcclOk) return;
    for (int peer = 0; peer < comm->world_size; ++peer) {
        if (peer != comm->rank) kccl::depart(*comm, peer, kKcclLeft);
    }
}

}  // extern "C"
