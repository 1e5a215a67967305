// FP16: IEEE 754's binary16. The twin of formats/float16.py.
#pragma once

#include "plain16.cuh"

namespace kccl::decode {

struct Float16 : Plain16<f16> {};

}  // namespace kccl::decode
