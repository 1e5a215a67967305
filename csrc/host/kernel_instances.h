// How a kernel becomes an entry of the host's table. kernel_table.py writes kernel_table.inc, which
// lists the kernels. Each kernels_*.cpp compiles that list for one instruction set, with internal
// linkage throughout, so that no set's code ends up in another's.
#pragma once

#include "../include/kccl/reduce.cuh"
#include "host.h"

namespace kccl::host {
namespace {

// The host core passes calls by address; a reference is one.
template <void (*kernel)(const KcclCall&)>
void by_address(const KcclCall* call) {
    kernel(*call);
}

// Kernels with a second instance for two ranks: there a CPU is bound by instructions.
template <void (*two_ranks)(const KcclCall&), void (*ranks)(const KcclCall&)>
void by_world_size(const KcclCall* call) {
    call->comm.world_size == 2 ? two_ranks(*call) : ranks(*call);
}

// In kernel_table.inc.
template <class T, class Op>
constexpr void add_reductions(KernelTable& table, KcclDtype dtype, KcclOp op);

template <class T>
constexpr void add_dtype(KernelTable& table, KcclDtype dtype) {
    add_reductions<T, Sum>(table, dtype, kKcclSum);
    add_reductions<T, Prod>(table, dtype, kKcclProd);
    add_reductions<T, Min>(table, dtype, kKcclMin);
    add_reductions<T, Max>(table, dtype, kKcclMax);
    if constexpr (!kIsInteger<T>) add_reductions<T, Avg>(table, dtype, kKcclAvg);
}

}  // namespace
}  // namespace kccl::host
