// Templates that make kernels entries of the host's KernelTable. kernel_table.py writes
// kernel_table.inc, which lists the kernels and the reducers. Each kernels_*.cpp compiles that list
// for one instruction set. Everything in the list has internal linkage, because otherwise the
// linker could use a function that is compiled for AVX-512 in the baseline's table.
#pragma once

#include "host.h"
#include "reducers.h"

namespace kccl::host {
namespace {

// Calls a kernel, which takes a reference to its KcclCall, where the host core passes a pointer.
template <void (*kernel)(const KcclCall&)>
void by_address(const KcclCall* call) {
    kernel(*call);
}

// Calls a kernel's instance for exactly two ranks, or its instance for any number of ranks. Between
// two ranks the time of a call on CPUs is that of its instructions, and the instance for two ranks
// has fewer.
template <void (*two_ranks)(const KcclCall&), void (*ranks)(const KcclCall&)>
void by_world_size(const KcclCall* call) {
    call->comm.world_size == 2 ? two_ranks(*call) : ranks(*call);
}

}  // namespace
}  // namespace kccl::host
