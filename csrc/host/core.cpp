// Finding a kernel, calling it, and timing it.
#include "../include/kccl/signal.cuh"
#include "host.h"

namespace kccl::host {
namespace {

struct InstructionSet {
    const char* name;
    const KernelTable* kernels;
};

InstructionSet best_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (v4) return {"x86-64-v4", &kKernelsV4};
    if (v3) return {"x86-64-v3", &kKernelsV3};
#endif
    return {"baseline", &kKernelsBaseline};
}

const InstructionSet& instruction_set() {
    static const InstructionSet best = best_instruction_set();
    return best;
}

}  // namespace
}  // namespace kccl::host

extern "C" {

const char* kccl_host_instruction_set(void) { return kccl::host::instruction_set().name; }

int kccl_host_bind(KcclHostOp* op) {
    const KcclCall& call = op->call;
    if (call.kernel >= kKcclNumKernels || call.dtype >= kKcclNumDtypes || call.op >= kKcclNumOps ||
        call.comm.abi_version != kKcclAbiVersion) {
        return -1;
    }
    op->kernel = kccl::host::instruction_set().kernels->kernel[call.kernel][call.dtype][call.op];
    return op->kernel == nullptr ? -1 : 0;
}

uint32_t kccl_host_run(KcclHostOp* op) {
    op->kernel(&op->call);
    return kccl::status_of(op->call.comm);
}

uint32_t kccl_host_time(KcclHostOp* op, uint64_t iterations, double* us) {
    uint64_t before = kccl_host_clock_ns();
    for (uint64_t i = 0; i < iterations; ++i) {
        const uint32_t status = kccl_host_run(op);
        if (status != kKcclOk) return status;
        const uint64_t after = kccl_host_clock_ns();
        us[i] = static_cast<double>(after - before) * 1e-3;
        before = after;
    }
    return kKcclOk;
}

void kccl_host_abort(const KcclDeviceComm* comm, const KcclRecord* record) {
    kccl::give_up(*comm, *record);
}

}  // extern "C"
