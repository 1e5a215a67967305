// wide_mma.cuh on AMD GPUs, whose matrix units take both operands from a warp's registers, and on
// NVIDIA GPUs other than Hopper.
#pragma once

namespace kccl::decode {

template <class T, uint32_t VECTORS>
struct WideMma {
    static constexpr bool kIsThere = false;
};

}  // namespace kccl::decode
