// Gives C++ code the declarations of abi.inc and api.inc.
#pragma once

#include "csrc/include/kccl/abi.h"

extern "C" {
#include "../abi.inc"
#include "api.inc"
}
