// narrow: rounds an array from the type in which sums accumulate to the caller's type, as the last
// part of a sum of products (scale.cuh). No peer takes part.
#pragma once

#include "../reduce.cuh"

namespace kccl {

// Rounds the elements of `in` to T, and stores them in `out`. A NaN becomes the canonical NaN.
// `out` and `in` have `count` elements and do not overlap. Called by all threads of the coop (a
// thread, warp or block: coop.cuh).
template <class T, class Coop>
KCCL_DEVICE void narrow(Coop coop, T* out, const typename Element<T>::Acc* in, uint64_t count) {
    [[maybe_unused]] const platform::DefaultFloats floats{};
    for (uint64_t i = coop.index(); i < count; i += coop.size()) {
        mem::store_plain(out + i, Element<T>::narrow(mem::load_plain(in + i)));
    }
}

namespace kernels {

template <class T>
KCCL_KERNEL void narrow(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    const Slice slice = call_slice<T>(call);
    kccl::narrow(block(), output_of<T>(call) + slice.begin,
                 input_of<typename Element<T>::Acc>(call) + slice.begin, slice.count);
}

}  // namespace kernels
}  // namespace kccl
