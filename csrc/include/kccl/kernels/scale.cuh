// scale: multiplies an array by a number, for a sum of products (premul_sum). No peer takes part.
//
// Each product is rounded once, to the type in which sums accumulate. So products of floats of 8
// and 16 bits are float. The result of the sum that follows is rounded once to the caller's type
// (narrow.cuh).
#pragma once

#include "../reduce.cuh"

namespace kccl {

// Multiplies by the number that KcclCall.factor describes.
template <class T>
struct Factor {
    using Acc = typename Element<T>::Acc;

    KCCL_DEVICE explicit Factor(uint64_t bits) {
        if constexpr (kIsInteger<T>) {
            factor = static_cast<Acc>(bits);
        } else if constexpr (kKindOf<T> == Kind::kComplex) {
            factor = {narrowed<decltype(factor.re)>(bits), 0};
        } else {
            factor = narrowed<Acc>(bits);
        }
    }

    KCCL_DEVICE Acc times(T value) const {
        if constexpr (kKindOf<T> == Kind::kComplex) {
            return {value.re * factor.re, value.im * factor.re};
        } else {
            return Prod::apply<T>(Element<T>::widen(value), factor);
        }
    }

    template <class Real>
    KCCL_DEVICE static Real narrowed(uint64_t bits) {
        return static_cast<Real>(platform::bit_cast<double>(bits));
    }

    Acc factor;
};

// Multiplies the elements of `in` by `factor` (KcclCall.factor), and stores the products in `out`.
// Both have `count` elements and do not overlap. Called by all threads of the coop (a thread, warp
// or block: coop.cuh); each may use what the others have stored after a sync.
template <class T, class Coop>
KCCL_DEVICE void scale(Coop coop, typename Element<T>::Acc* out, const T* in, uint64_t count,
                       uint64_t factor) {
    [[maybe_unused]] const platform::DefaultFloats floats{};
    const Factor<T> by(factor);
    for (uint64_t i = coop.index(); i < count; i += coop.size()) {
        mem::store_plain(out + i, by.times(mem::load_plain(in + i)));
    }
}

namespace kernels {

template <class T>
KCCL_KERNEL void scale(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    const Slice slice = call_slice<T>(call);
    kccl::scale(block(), output_of<typename Element<T>::Acc>(call) + slice.begin,
                input_of<T>(call) + slice.begin, slice.count, call.factor);
}

}  // namespace kernels
}  // namespace kccl
