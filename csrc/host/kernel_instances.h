// Makes kernels entries of the host's table. kernel_table.py writes kernel_table.inc, which lists
// the kernels and the reducers. Each kernels_*.cpp compiles that list for one instruction set, with
// internal linkage throughout, so that no set's code ends up in another's.
#pragma once

#include "host.h"
#include "reducers.h"

namespace kccl::host {
namespace {

// Calls a kernel, which takes a reference, by the address that the host core passes.
template <void (*kernel)(const KcclCall&)>
void by_address(const KcclCall* call) {
    kernel(*call);
}

// Calls the kernel's instance for two ranks, or the one for any number. Between two ranks a CPU is
// bound by instructions, of which an instance of their own has fewer.
template <void (*two_ranks)(const KcclCall&), void (*ranks)(const KcclCall&)>
void by_world_size(const KcclCall* call) {
    call->comm.world_size == 2 ? two_ranks(*call) : ranks(*call);
}

}  // namespace
}  // namespace kccl::host
