// BF16: the upper half of FP32's bits. The twin of formats/bfloat16.py.
#pragma once

#include "plain16.cuh"

namespace kccl::decode {

struct Bfloat16 : Plain16<bf16> {};

}  // namespace kccl::decode
