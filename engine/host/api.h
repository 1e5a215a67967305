// abi.inc and api.inc for C++.
#pragma once

#include "csrc/include/kccl/abi.h"

extern "C" {
#include "../abi.inc"
#include "api.inc"
}
